"""`diffrl` on the command line: train, doctor, plan, pretrain. Exit codes: 0 done, 1 a doctor's check failed or a plan does
not fit, 2 bad input, 130 interrupted (resumable)."""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: idle OpenMP threads sleep, not spin beside neighbours

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

EPILOG = """examples:
  diffrl train --task digits --algorithm art --output runs/demo
  diffrl train --resume runs/demo
  diffrl train --task digits --engine ray --generators 1 --trainers 1 --fragments 4
  diffrl train --algorithm nft --draft nvfp4 --pool 96 --group-size 24 --prompts-per-iteration 4
  diffrl train --model PATH --task prompts --prompts prompts.txt --reward ocr --height 512 --width 512
  torchrun --nproc-per-node 2 -m diffrl.cli train --algorithm art --threads 1
  diffrl train --model PATH --task prompts --prompts prompts.txt --reward clip:FOLDER --held-out-reward pick:FOLDER
  diffrl doctor --task digits --algorithm art
  diffrl plan --model PATH --height 1024 --width 1024 --gpu-memory 80
  diffrl pretrain digits --output my_digits

exit codes: 0 done, 1 a check of the doctor failed or a plan does not fit, 2 bad input, 130 interrupted (go on with --resume)"""


class Parser(argparse.ArgumentParser):
    """One clear line on bad input, with the nearest known word, and exit code 2."""

    def parse_known_args(self, args=None, namespace=None) -> Any:
        """Unknown options are this parser's error: the command's, which knows the nearest one, not the top parser's."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """The line, with what an unknown option may have been meant to be; exit code 2."""
        words = [option for action in self._actions for option in action.option_strings]
        for word in message.replace("'", " ").split():
            word = word.split("=")[0].rstrip(":")
            close = difflib.get_close_matches(word, words, n=1)
            if word.startswith("--") and close and close[0] != word:
                message += f" (did you mean {close[0]}?)"
        self.exit(2, f"{self.prog}: error: {message}\n")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per field of Settings, with its default and help."""
    from diffrl.reward_names import FORMS
    from diffrl.settings import ALGORITHMS, ENGINES, TASKS, Settings

    helps = {
        "task": f"one of {', '.join(TASKS)}",
        "model": "folder of a saved pipeline or a hub id; none: the task's own",
        "algorithm": f"one of {', '.join(ALGORITHMS)}",
        "reward": f"one of {', '.join(FORMS)}, or MODULE:FUNCTION",
        "held_out_reward": "a second reward, evaluated and never trained on",
        "prompts": "file with one prompt per line; none: the task's own",
        "iterations": "rollouts; each is followed by the algorithm's optimizer steps",
        "group_size": "samples per prompt, k",
        "prompts_per_iteration": "prompts per rollout, g",
        "steps": "sampling steps",
        "learning_rate": "of AdamW",
        "trained_steps": "auto (3/8 of the steps, from the noisiest 5/8; art_flash: all of the noisiest 4), all, noisiest:N, random:M (per trajectory) or random:M/N (M of the noisiest N)",
        "radius": "of the trust region",
        "lora_rank": "r of the LoRA; 0: every parameter is trained, in float32",
        "lora_alpha": "alpha of the LoRA",
        "seed": "of everything random",
        "eval_every": "iterations between evaluations at held-out seeds",
        "eval_samples": "held-out samples per prompt",
        "checkpoint_every": "iterations between checkpoints",
        "micro_batch": "samples per backward pass; none: the whole window",
        "pack": "states (sample, step) per backward pass; none: as many as the window or fragment has",
        "rollout_chunk": "samples per model call in the rollout; none: all",
        "draft": "Sol-RL: none, nvfp4 or mxfp4 (a four-bit copy, emulated), or policy (itself, with --draft-steps)",
        "pool": "Sol-RL: seeds drafted per prompt, of which the best and the worst --group-size / 2 are trained on",
        "draft_steps": "Sol-RL: sampling steps of a draft",
        "draft_skip": "Sol-RL: layers left as they are: beginnings of name components, with commas between",
        "draft_min_dim": "Sol-RL: layers whose larger axis is at most this are left as they are",
        "audit_every": "Sol-RL: iterations between comparisons of a whole pool with the policy; none: never",
        "height": "pixels; none: the task's own",
        "width": "pixels; none: the task's own",
        "frames": "of a video; none: pictures",
        "images": "file with one picture's file name per line, the first frames of image-to-video",
        "guidance_scale": "none: the task's own",
        "device": "where the model runs",
        "threads": "of torch and the OCR engine",
        "engine": f"who runs the iterations, one of {', '.join(ENGINES)}",
        "generators": "actors that sample (ray)",
        "trainers": "ranks that train (ray)",
        "fragments": "parts of a batch that are generated, scored and trained on their own (in_process, ray)",
        "stale": "first fragments that may be generated under weights one iteration old (in_process, ray)",
    }
    for field in fields(Settings):
        default: Any = field.default
        kind = {"int": int, "float": float}.get(str(getattr(field.type, "__name__", field.type)).split(" ")[0], str)
        if default is None:
            annotation = str(field.type)
            kind = int if "int" in annotation else float if "float" in annotation else str
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=default,
            metavar=kind.__name__.upper().replace("STR", "TEXT"),
            help=f"{helps[field.name]} (default: {'none' if default in (None, '') else default})",
        )


DTYPES = ("bfloat16", "float16", "float32")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from diffrl.settings import Settings

    def count(name: str, default: int | None, text: str, required: bool = False) -> None:
        default_text = "" if required else f" (default: {'none' if default is None else default})"
        parser.add_argument(
            name, type=int, default=default, metavar="INT", required=required, help=f"{text}{default_text}"
        )

    parser.add_argument(
        "--model", metavar="FOLDER", required=True, help="folder of a saved pipeline; no weight is read"
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
    parser.add_argument("--encoders-off", action="store_true", help="text encoders leave the device after encoding")
    parser.add_argument("--vae-off", action="store_true", help="the VAE leaves the device between decodes")
    parser.add_argument("--gpu-memory", type=float, default=None, metavar="GB", help="what there is, in 10^9 bytes")


def make_parser() -> argparse.ArgumentParser:
    """The command line: options of train and doctor are the fields of `settings.Settings`.

    >>> make_parser().parse_args(["pretrain", "digits", "--output", "folder"]).seed
    0
    """
    from diffrl.version import __version__

    parser = Parser(
        prog="diffrl",
        description="Reinforcement-learning post-training of diffusion and flow models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"diffrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    train = commands.add_parser("train", help="train a model on a task, into a folder", allow_abbrev=False)
    _add_settings(train)
    train.add_argument(
        "--output", metavar="FOLDER", default=None, help="new folder of the run (default: runs/TASK-ALGORITHM)"
    )
    train.add_argument(
        "--resume",
        metavar="FOLDER",
        default=None,
        help="go on with this run; its settings are read, only --iterations may change",
    )
    train.add_argument("--overwrite", action="store_true", help="replace --output if it is a run of diffrl")
    train.add_argument(
        "--no-pictures", action="store_true", help="draw nothing: no curve.png, before_after.png, drafts.png, ranks.png"
    )
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    doctor = commands.add_parser(
        "doctor", help="check in seconds that a set-up learns the right way", allow_abbrev=False
    )
    _add_settings(doctor)
    _add_plan(commands.add_parser("plan", help="bytes a run's tensors take, before it is started", allow_abbrev=False))
    pretrain = commands.add_parser("pretrain", help="train a task's tiny base model from scratch", allow_abbrev=False)
    pretrain.add_argument("task", choices=["digits"], help="which base model")
    pretrain.add_argument("--output", metavar="FOLDER", required=True, help="new folder of the saved pipeline")
    pretrain.add_argument(
        "--seed", type=int, default=0, help="of everything random (default: 0); takes about 7 minutes"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. No example: it runs a command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "diffrl"
    try:
        options = make_parser().parse_args(words)
        sys.path.insert(0, str(Path.cwd()))  # where --reward MODULE:FUNCTION looks first, as with `python -m`
        name = f"diffrl {options.command}"
        return {"train": _train, "doctor": _doctor, "plan": _plan, "pretrain": _pretrain}[options.command](
            options, words
        )
    except (ValueError, ImportError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"{name}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _settings(options: argparse.Namespace) -> Any:
    from diffrl.settings import Settings

    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})


def _bar(**numbers: Any) -> Any:
    from tqdm import tqdm

    return tqdm(desc="iteration", dynamic_ncols=True, **numbers)


def _train(options: argparse.Namespace, words: Sequence[str]) -> int:
    from diffrl.ranks import launched
    from diffrl.run import Interrupted, run

    ranks = launched()
    progress = None if options.quiet else _bar
    folder = Path(options.resume or options.output or f"runs/{options.task}-{options.algorithm}")
    try:
        if options.resume is not None:
            given = [w.split("=")[0] for w in words[1:] if w.startswith("--")]
            if other := sorted(set(given) - {"--resume", "--iterations", "--no-pictures", "--quiet"}):
                raise ValueError(
                    f"--resume reads its settings from {options.resume}: {', '.join(other)} cannot be given"
                )
            more = options.iterations if "--iterations" in given else None
            rows = run(
                folder, resume=True, iterations=more, progress=progress, pictures=not options.no_pictures, ranks=ranks
            )
        else:
            settings = _settings(options)
            what = f"{settings.iterations} iterations of {settings.prompts_per_iteration} prompts x {settings.group_size} samples"
            title = f"{settings.algorithm} on {settings.task}, reward {settings.reward}: {what} -> {folder}"

            def titled(**numbers: Any) -> Any:  # once everything has been accepted
                print(title, flush=True)
                return None if progress is None else progress(**numbers)

            rows = run(
                folder,
                settings,
                overwrite=options.overwrite,
                progress=titled,
                pictures=not options.no_pictures,
                ranks=ranks,
            )
    except Interrupted as stop:
        print(f"\n{stop}" * (ranks.rank == 0), file=sys.stderr)
        return 130
    except KeyboardInterrupt:  # outside the iterations: while the model loads, or while pictures are drawn
        if not (folder / "metrics.jsonl").is_file():
            raise
        print(f"\ninterrupted; go on with: diffrl train --resume {folder}", file=sys.stderr)
        return 130
    if ranks.rank == 0:
        print(summary(folder, rows))
    return 0


def summary(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """What a run came to: its first and last evaluation, and its files. No example: it reads a run's folder."""
    evaluated = [row for row in rows if "eval/reward" in row]
    lines = []
    for name in ("eval/exact_match", "eval/reward", "eval/held_out_reward"):
        values = [row[name] for row in evaluated if row.get(name) is not None]
        values = [row[base] for row in rows[:1] if (base := name.replace("eval/", "base/")) in row] + values
        if values:
            lines.append(f"{name}: {values[0]:.4f} -> {values[-1]:.4f}")
    whole = [f"seconds/{part}" for part in ("rollout", "reward", "update", "evaluation")]  # others are parts of these
    seconds = sum(row.get(name) or 0.0 for row in rows for name in whole)
    lines.append(
        f"{len(rows)} iterations, {seconds:.0f} s; written: {', '.join(sorted(p.name for p in folder.iterdir()))}"
    )
    return "\n".join(lines)


def _doctor(options: argparse.Namespace, words: Sequence[str]) -> int:
    import torch

    from diffrl.loop import diagnose
    from diffrl.settings import build

    settings = _settings(options)
    torch.set_num_threads(settings.threads)
    bench = build(settings)
    report = diagnose(
        bench.model,
        bench.algorithm,
        bench.prompts,
        bench.reward,
        images=bench.images,
        micro_batch=settings.micro_batch,
        rollout_chunk=settings.rollout_chunk,
        group_size=settings.group_size,
        steps=settings.steps,
        seed=settings.seed,
        learning_rate=settings.learning_rate,
    )
    print(report)
    return 0 if report.ok else 1


def _plan(options: argparse.Namespace, words: Sequence[str]) -> int:
    import torch

    from diffrl.memory import empty_pipeline, plan, plan_text

    lines = plan(
        empty_pipeline(options.model),
        height=options.height,
        width=options.width,
        frames=options.frames,
        rank=options.lora_rank or None,
        samples=options.group_size * options.prompts_per_iteration,
        kept=options.kept_steps,
        copies=options.copies,
        dtype=getattr(torch, options.dtype) if options.lora_rank else torch.float32,
        encoders_on_device=not options.encoders_off,
        vae_on_device=not options.vae_off,
    )
    print(plan_text(lines, gpu_memory=options.gpu_memory))
    needed = sum(line.bytes for line in lines if line.on_device)
    return 0 if options.gpu_memory is None or needed < 1e9 * options.gpu_memory else 1


def _pretrain(options: argparse.Namespace, words: Sequence[str]) -> int:
    from diffrl.tasks.pretrain import pretrain_digits

    if Path(options.output).exists():
        raise ValueError(f"--output {options.output!r} exists")
    pretrain_digits(options.output, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
