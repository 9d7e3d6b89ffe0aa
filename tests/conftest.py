"""One thread, sleeping not spinning; shapes and dtypes of every annotated function checked by jaxtyping and beartype.

A refused input must be refused by the function itself: where the annotation check of an argument fails, the bare function
is called, so that its own ValueError is what a test sees; only if it accepts the input does the annotation error stand.
"""

import functools
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import jaxtyping
import torch

if os.environ.get("DIFFRL_TYPECHECK", "1") == "1":
    _jaxtyped = jaxtyping.jaxtyped

    def _refusals_first(*args, **kwargs):
        decorate = _jaxtyped(*args, **kwargs)

        def wrap(function):
            checked = decorate(function)
            if not callable(function) or isinstance(function, type):
                return checked

            @functools.wraps(function)
            def call(*a, **k):
                try:
                    return checked(*a, **k)
                except jaxtyping.TypeCheckError:
                    function(*a, **k)
                    raise

            return call

        return wrap

    jaxtyping.jaxtyped = _refusals_first
    # An int is a float here, as in PEP 484 (beartype alone would refuse `shift=3`).
    jaxtyping.install_import_hook("diffrl", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "diffrl", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "diffrl"))
