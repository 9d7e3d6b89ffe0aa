"""Reinforcement-learning post-training of diffusion and flow models, as small pure PyTorch functions."""

from diffrl.version import __version__

__all__ = ["__version__"]
