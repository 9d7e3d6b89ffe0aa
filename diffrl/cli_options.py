"""The options of every command, with their help, defaults and examples; and which commands have which."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from diffrl.cli_text import Parser

EXIT_CODES = """exit codes:
  0    done
  1    a check of the doctor failed, a plan does not fit, or a run failed after it had begun (what it wrote is kept: --resume)
  2    wrong usage or input: nothing was begun, nothing is written
  130  interrupted by Ctrl-C or SIGTERM; a run goes on with --resume"""

EXAMPLES = {
    "": """examples:
  diffrl train --task digits --algorithm art --output runs/demo
  diffrl train --resume runs/demo
  diffrl doctor --task digits --algorithm art
  diffrl plan --model PATH --height 1024 --width 1024 --gpu-memory 80
  diffrl pretrain digits --output my_digits""",
    "train": """examples:
  diffrl train --task digits --algorithm art --output runs/demo
  diffrl train --resume runs/demo --iterations 120
  diffrl train --algorithm nft --draft nvfp4 --pool 96 --group-size 24 --prompts-per-iteration 4
  diffrl train --task prompts --model PATH --prompts prompts.txt --reward ocr --height 512 --width 512
  diffrl train --task prompts --model PATH --prompts prompts.txt --reward clip:FOLDER --held-out-reward pick:FOLDER --device cuda --gradient-checkpointing --encoders-off --micro-batch 2
  diffrl train --task digits --engine ray --generators 1 --trainers 1 --fragments 4
  diffrl train --task digits --track tensorboard --track wandb:my-project
  diffrl train --task digits --json > rows.jsonl
  torchrun --nproc-per-node 2 -m diffrl.cli train --algorithm art --threads 1""",
    "doctor": """examples:
  diffrl doctor --task digits --algorithm art
  diffrl doctor --task prompts --model PATH --prompts prompts.txt --reward MODULE:FUNCTION --json""",
    "plan": """examples:
  diffrl plan --model PATH --height 1024 --width 1024 --gpu-memory 80
  diffrl plan --model PATH --height 480 --width 832 --frames 53 --lora-rank 0 --encoders-off --json""",
    "pretrain": """examples:
  diffrl pretrain digits --output my_digits
  diffrl train --task digits --model my_digits""",
}

ABOUT = {
    "train": "Train a model on a task, into a folder. What will be done is printed first. stdout: what is told in words, or with --json "
    "JSON lines alone (settings, one per iteration, a summary or an error); stderr: progress, warnings and errors.",
    "doctor": "Check in seconds that a set-up learns the right way: same seeds same images, finite rewards, groups with spread, replay "
    "equal to rollout, gradients where they belong, a reward that goes up. The model is left as it was; nothing is written.",
    "plan": "Bytes that a run's tensors take, by formula, from a saved pipeline's configurations: no weight is read. Activations are "
    "not predicted.",
    "pretrain": "Train a task's tiny base model from scratch, as the shipped one was: about 7 minutes on two cores.",
}

NOT_THE_DOCTOR_S = (
    *("held_out_reward", "iterations", "prompts_per_iteration", "eval_every", "eval_samples", "checkpoint_every"),
    *("pack", "audit_every", "engine", "generators", "trainers", "fragments", "stale"),
)
"""Settings that say nothing to the doctor, which looks at three iterations of at most eight prompts."""

DTYPES = ("bfloat16", "float16", "float32")

OF_DRAFTS = {
    "draft": "none, nvfp4 or mxfp4 (a four-bit copy, emulated), or policy (itself, with --draft-steps)",
    "pool": "seeds drafted per prompt, of which the best and the worst --group-size / 2 are trained on",
    "draft_steps": "sampling steps of a draft",
    "draft_skip": "layers left as they are: beginnings of name components, with commas between",
    "draft_min_dim": "layers whose larger axis is at most this are left as they are",
    "audit_every": "iterations between comparisons of a whole pool with the policy; none: never",
}
"""What the options of a draft are."""


def _helps() -> dict[str, dict[str, str]]:
    from diffrl.reward_names import FORMS
    from diffrl.settings import ALGORITHMS, ENGINES, TASKS

    return {
        "what is trained": {
            "task": f"one of {', '.join(TASKS)}",
            "model": "folder of a saved pipeline or a hub id; none: the task's own",
            "algorithm": f"one of {', '.join(ALGORITHMS)}",
            "reward": f"one of {', '.join(FORMS)}, or MODULE:FUNCTION",
            "held_out_reward": "a second reward, evaluated and never trained on",
            "prompts": "file with one prompt per line; none: the task's own",
            "images": "file with one picture's file name per line, the first frames of image-to-video",
            **dict.fromkeys(("height", "width"), "pixels; none: the task's own, of prompts 512"),
            "frames": "of a video; none: pictures",
            "guidance_scale": "none: the task's own, of prompts the pipeline's",
            "max_sequence_length": "text tokens; none: the task's own, of prompts the pipeline's",
            "lora_rank": "r of the LoRA; 0: every parameter is trained, in float32",
            "lora_alpha": "alpha of the LoRA",
        },
        "how it is trained": {
            "iterations": "rollouts; each is followed by the algorithm's optimizer steps",
            "group_size": "samples per prompt, k",
            "prompts_per_iteration": "prompts per rollout, g",
            "steps": "sampling steps",
            "trained_steps": "auto (3/8 of the steps, from the noisiest 5/8; art_flash: all of the noisiest 4), all, noisiest:N, random:M (per trajectory) or random:M/N (M of the noisiest N)",
            "learning_rate": "of AdamW",
            "radius": "of the trust region",
            "seed": "of everything random",
        },
        "drafts (Sol-RL)": OF_DRAFTS,
        "evaluation and checkpoints": {
            "eval_every": "iterations between evaluations at held-out seeds",
            "eval_samples": "held-out samples per prompt",
            "checkpoint_every": "iterations between checkpoints",
        },
        "memory": {
            "micro_batch": "samples per backward pass; none: the whole window",
            "pack": "states (sample, step) per backward pass; none: as many as the window or fragment has",
            "rollout_chunk": "samples per model call in the rollout; none: all",
            "gradient_checkpointing": "recompute activations in the backward pass: less memory, about a third more time",
            "encoders_off": "encode every prompt first, then move the text and image encoders to the CPU",
            "vae_off": "keep the VAE on the CPU between decodes",
        },
        "where it runs": {
            "device": "where the model runs",
            "threads": "of torch and the OCR engine",
            "engine": f"who runs the iterations, one of {', '.join(ENGINES)}",
            "generators": "actors that sample (ray)",
            "trainers": "ranks that train (ray)",
            "fragments": "parts of a batch that are generated, scored and trained on their own (in_process, ray)",
            "stale": "first fragments that may be generated under weights one iteration old (in_process, ray)",
        },
    }


def option_of(name: str) -> str:
    """The option of a setting.

    >>> option_of("group_size")
    '--group-size'
    """
    return f"--{name.replace('_', '-')}"


def _add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """One option per field of Settings, with its default and help."""
    from diffrl.settings import Settings

    types = {field.name: field for field in fields(Settings)}
    for title, helps in _helps().items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            if name in without:
                continue
            default: Any = types[name].default
            annotation = str(getattr(types[name].type, "__name__", types[name].type))
            if annotation == "bool":
                group.add_argument(option_of(name), action="store_true", help=f"{text} (default: off)")
                continue
            kind = int if "int" in annotation else float if "float" in annotation else str
            shown = "none" if default in (None, "") else default
            group.add_argument(
                option_of(name),
                type=kind,
                default=default,
                metavar=kind.__name__.upper().replace("STR", "TEXT"),
                help=f"{text} (default: {shown})",
            )


def _add_train(parser: argparse.ArgumentParser) -> None:
    from diffrl.tracking import TRACKERS

    group = parser.add_argument_group("the run")
    group.add_argument(
        "--output", metavar="FOLDER", default=None, help="new folder of the run (default: runs/TASK-ALGORITHM)"
    )
    group.add_argument(
        "--resume",
        metavar="FOLDER",
        default=None,
        help="go on with this run (default: none); its settings are read, of which only --iterations may change",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace --output if it is a run of diffrl (default: off)"
    )
    group.add_argument(
        "--track",
        metavar="KIND",
        action="append",
        default=[],
        help=f"also tell {', '.join(TRACKERS)} of every iteration, in the run's folder (default: none); may be given several "
        "times; wandb:PROJECT names the project, and wandb is offline unless WANDB_MODE says otherwise",
    )
    group.add_argument(
        "--no-pictures",
        action="store_true",
        help="draw nothing: no curve.png, before_after.png, drafts.png, ranks.png (default: off)",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar (default: off)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from diffrl.settings import Settings

    def count(name: str, default: int | None, text: str, required: bool = False) -> None:
        default_text = " (required)" if required else f" (default: {'none' if default is None else default})"
        parser.add_argument(
            name, type=int, default=default, metavar="INT", required=required, help=f"{text}{default_text}"
        )

    parser.add_argument(
        "--model", metavar="FOLDER", required=True, help="folder of a saved pipeline; no weight is read (required)"
    )
    count("--height", None, "pixels", required=True)
    count("--width", None, "pixels", required=True)
    count("--frames", None, "of a video")
    count("--lora-rank", Settings.lora_rank, "r of the LoRA; 0: all parameters are trained, in float32")
    count("--group-size", Settings.group_size, "samples per prompt, k")
    count("--prompts-per-iteration", Settings.prompts_per_iteration, "prompts per rollout, g")
    count("--kept-steps", Settings.steps, "sampling steps kept of each trajectory")
    count("--copies", 1, "of the policy beside the live one: behaviour, reference, an average")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of base weights (default: {DTYPES[0]})")
    parser.add_argument(
        "--encoders-off", action="store_true", help="text encoders leave the device after encoding (default: off)"
    )
    parser.add_argument(
        "--vae-off", action="store_true", help="the VAE leaves the device between decodes (default: off)"
    )
    parser.add_argument(
        "--gpu-memory", type=float, default=None, metavar="GB", help="what there is, in 10^9 bytes (default: none)"
    )


def make_parser() -> Parser:
    """The command line: options of train and doctor are the fields of `settings.Settings`.

    >>> make_parser().parse_args(["pretrain", "digits", "--output", "folder"]).seed
    0
    """
    from diffrl.version import __version__

    parser = Parser(
        prog="diffrl",
        description="Reinforcement-learning post-training of diffusion and flow models. `diffrl COMMAND --help` explains each command.",
        epilog=f"{EXAMPLES['']}\n\n{EXIT_CODES}",
    )
    parser.add_argument(
        "--version", action="version", version=f"diffrl {__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, text: str, machines: str, fill: Callable[[Any], None], **more: Any) -> None:
        epilog = f"{EXAMPLES[name]}\n\n{EXIT_CODES}"
        made = commands.add_parser(name, help=text, description=ABOUT[name], epilog=epilog, fill=fill, **more)
        made.add_argument(
            "--json",
            action="store_true",
            help=f'for machines: {machines} on stdout, words on stderr; where it fails, last an "error" (default: off)',
        )

    def train(made: argparse.ArgumentParser) -> None:
        _add_train(made)
        _add_settings(made)

    not_here = "an option of diffrl train that the doctor does not use"
    rows = "settings, iterations and summary as JSON lines"
    command("train", "train a model on a task, into a folder", rows, train)
    command(
        "doctor",
        "check in seconds that a set-up learns the right way",
        "the report as one JSON object",
        partial(_add_settings, without=NOT_THE_DOCTOR_S),
        elsewhere={option_of(name): not_here for name in NOT_THE_DOCTOR_S},
    )
    command("plan", "bytes a run's tensors take, before it is started", "the lines as one JSON object", _add_plan)
    written = "what was written as one JSON object"
    command("pretrain", "train a task's tiny base model from scratch", written, _add_pretrain)
    return parser


def _add_pretrain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["digits"], help="which base model: digits")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="new folder of the saved pipeline (required)")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of everything random (default: 0)")
