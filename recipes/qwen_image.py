"""Qwen-Image writes: DiffusionART, OCR reward. No paper gives settings for it: these are SD3.5's (2610.12572), at its own guidance of 4.

    python recipes/qwen_image.py Qwen/Qwen-Image prompts.txt     each prompt with its text in quotes

Never run on the released weights here.
"""

from sd35_ocr import recipe, reward

__all__ = ["recipe", "reward"]

if __name__ == "__main__":
    from command import main

    main(recipe, reward, __doc__)
