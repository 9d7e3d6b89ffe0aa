"""The house rules that a machine can check: floors, light import, lengths, documentation, controls, no global randomness.

Every rule is a function of source text, and each has a negative control: a test with `control` in its name that breaks the rule.
The convention for all test files: a negative control has `control` in its test's name, or says "negative control" in its body.
"""

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffrl"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").glob("test_*.py"))

FLOORS = {
    **dict.fromkeys(("version", "types", "checks", "numbers"), 0),
    **dict.fromkeys(("kernels", "sampling", "guidance", "losses", "parallel"), 1),
    **dict.fromkeys(("directions", "conflicts", "diversity", "fp4", "ranks"), 1),
    **dict.fromkeys(("schedules", "partitions", "costs", "simulation", "lending", "presets"), 1),
    **dict.fromkeys(("quant", "contrast", "trust_region", "rewards", "models", "families"), 2),
    **dict.fromkeys(("family", "families_image", "families_video", "encoding", "memory"), 2),
    **dict.fromkeys(("reward_rows", "reward_tools", "scorers", "scorer_weights", "objects"), 2),
    **dict.fromkeys(("remote_rewards", "reward_names", "reward_server"), 2),
    **dict.fromkeys(
        (
            "algorithms",
            "rollouts",
            "credits",
            "states",
            "policy_gradients",
            "objectives",
            "extensions",
            "sol_rl",
            "drafts",
        ),
        3,
    ),
    **dict.fromkeys(
        (
            "loop",
            "executors",
            "plots",
            "cli",
            "tasks",
            "windows",
            "checkpoints",
            "settings",
            "run",
            "folders",
            "tracking",
            "cli_text",
            "cli_options",
            "training_checks",
            "__main__",
        ),
        4,
    ),
    **dict.fromkeys(("stages", "trainers", "backends", "conductor", "ray_backend", "engines"), 4),
}
HEAVY = {
    *("diffusers", "peft", "transformers", "torchao", "matplotlib", "PIL", "rapidocr", "onnxruntime", "tesserocr"),
    *("accelerate", "ray", "scipy", "tokenizers", "torchao", "tensorboard", "wandb"),
}
LONGEST_FUNCTION, LONGEST_FILE = 60, 500
LONG_FUNCTIONS = {
    "models.from_pipeline": (75, "half of it is the docstring that states every argument and refusal"),
}
LONG_FILES: dict[str, tuple[int, str]] = {}


def name_of(path: Path) -> str:
    """diffrl/tasks/toy.py -> tasks.toy; a package is its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    return {name_of(path): path.read_text() for path in FILES}


# ---- floors


def imported(source: str, modules: set[str]) -> set[str]:
    """Names of our modules that a source imports, at any depth; `from diffrl.tasks import digits` is tasks.digits."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            parts = path.split(".")
            if parts[0] != "diffrl":
                continue
            longest = next((n for n in range(len(parts), 1, -1) if ".".join(parts[1:n]) in modules), 1)
            found.add(".".join(parts[1:longest]))
    return found


def graph_of(texts: dict[str, str]) -> dict[str, set[str]]:
    return {name: imported(text, set(texts)) - {name, ""} for name, text in texts.items()}


def floor(name: str) -> int:
    return FLOORS[name.split(".")[0]]


def climbing(graph: dict[str, set[str]]) -> list[str]:
    """Imports that go up: `sampling [1] -> loop [4]`."""
    return [
        f"{a} [{floor(a)}] -> {b} [{floor(b)}]" for a in graph if a for b in sorted(graph[a]) if floor(b) > floor(a)
    ]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of imports, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_every_module_has_a_floor():
    assert {name.split(".")[0] for name in sources() if name} <= set(FLOORS)


def test_imports_only_go_down_or_sideways_without_cycles():
    graph = graph_of(sources())
    assert climbing(graph) == []
    assert cycle(graph) == []
    assert {"algorithms", "checkpoints", "windows", "sampling"} <= graph["loop"]  # the graph sees what is there


def test_control_an_import_that_climbs_is_found():
    for line in (
        "from diffrl.loop import train",
        "import diffrl.loop",
        "from diffrl import loop",
        "def f():\n    from diffrl.loop import train",
        "if TYPE_CHECKING:\n    from diffrl import loop as l",
    ):
        texts = {"sampling": f'"""Doc."""\nimport torch\n{line}\n', "loop": "from diffrl.sampling import rollout"}
        assert climbing(graph_of(texts)) == ["sampling [1] -> loop [4]"], line
        assert cycle(graph_of(texts)), line


def test_control_a_cycle_on_one_floor_is_found():
    texts = {"windows": "import diffrl.loop", "loop": "from diffrl.run import run", "run": "from diffrl import windows"}
    assert climbing(graph_of(texts)) == []
    assert cycle(graph_of(texts)) == ["loop", "run", "windows", "loop"]
    assert cycle(graph_of({**texts, "run": ""})) == []


def test_control_modules_of_a_package_are_told_apart():
    texts = {"tasks": "", "tasks.toy": "", "tasks.digits": "", "run": "from diffrl.tasks import digits"}
    assert graph_of(texts)["run"] == {"tasks.digits"}
    assert imported("from diffrl.tasks.toy import PROMPTS\nimport torch", set(texts)) == {"tasks.toy"}


# ---- light import


def top_level_imports(source: str) -> set[str]:
    """Packages imported when the module is, conditions and tries included, bodies of functions not."""
    found, queue = set(), list(ast.parse(source).body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            queue += list(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_heavy_package_is_imported_at_the_top(path):
    assert not top_level_imports(path.read_text()) & HEAVY


def test_control_a_heavy_import_is_found_outside_functions_only():
    assert top_level_imports("try:\n    import peft.tuners\nexcept ImportError:\n    pass") == {"peft"}
    assert top_level_imports("class A:\n    from PIL import Image") == {"PIL"}
    assert top_level_imports("def f():\n    import matplotlib") == set()


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


LIGHT = "import diffrl, diffrl.loop, diffrl.algorithms, diffrl.models, diffrl.rewards, diffrl.run, diffrl.plots, diffrl.cli, diffrl.quant, diffrl.reward_server, diffrl.parallel, diffrl.tracking"


def test_importing_the_library_loads_nothing_heavy():
    loaded = loaded_by(f"{LIGHT}\nfrom diffrl.tasks import digits, toy")
    assert {"diffrl", "torch"} <= loaded
    assert not loaded & HEAVY


def test_control_a_heavy_module_would_be_seen():
    assert "PIL" in loaded_by("import PIL") & HEAVY


# ---- lengths


def long_functions(source: str, limit: int = LONGEST_FUNCTION) -> dict[str, int]:
    """Lines of every function over the limit, decorators and docstring included."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            if lines > limit:
                found[node.name] = lines
    return found


def test_functions_fit_on_a_screen():
    found = {
        f"{module}.{name}": lines for module, text in sources().items() for name, lines in long_functions(text).items()
    }
    assert {name: lines for name, lines in found.items() if lines > LONG_FUNCTIONS.get(name, (0, ""))[0]} == {}
    assert set(LONG_FUNCTIONS) <= set(found), "an exception that is needed no more"


def test_files_are_of_readable_length():
    found = {name: len(text.splitlines()) for name, text in sources().items()}
    found = {name: lines for name, lines in found.items() if lines > LONGEST_FILE}
    assert {name: lines for name, lines in found.items() if lines > LONG_FILES.get(name, (0, ""))[0]} == {}
    assert set(LONG_FILES) <= set(found), "an exception that is needed no more"


def test_control_a_long_function_is_found():
    body = "    pass\n" * 60
    assert long_functions(f"def f():\n{body}") == {"f": 61}
    assert long_functions(f"@cache\ndef f():\n{body[:-9]}") == {"f": 61}
    assert long_functions(f"def f():\n{body[:-9]}") == {}


# ---- documented, mentioned


def public(source: str) -> dict[str, bool]:
    """Public functions and classes of a module, and whether each has a docstring."""
    nodes = ast.parse(source).body
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {
        node.name: bool(ast.get_docstring(node))
        for node in nodes
        if isinstance(node, kinds) and not node.name.startswith("_")
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_and_public_name_is_documented(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source))
    assert [name for name, documented in public(source).items() if not documented] == []


REASON = re.compile(r"No example: \S[^\n]{0,69}\.\Z")


def unexplained(source: str) -> list[str]:
    """Public functions whose docstring neither shows a result (`>>>`, run by `make doctest`) nor ends with why not.

    The reason is the docstring's last sentence, on one line: "No example: starts processes." Not both.
    """
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            shown = any(example.want for example in doctest.DocTestParser().get_examples(text))
            if shown == bool(REASON.search(text)) or (shown and "No example:" in text):
                found.append(node.name)
    return found


def undocumented_methods(source: str) -> list[str]:
    """Public methods of public classes without a docstring; a body of one or two lines says itself what it does."""
    found = []
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_"):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                    lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                    if lines > 2 and not ast.get_docstring(node):
                        found.append(f"{owner.name}.{node.name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_public_function_has_an_example_or_a_reason(path):
    assert unexplained(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_public_method_is_documented_or_two_lines_long(path):
    assert undocumented_methods(path.read_text()) == []


TESTED_THROUGH = {
    "cli_text.Formatter": "make_parser",
    "family.Size": "from_pipeline",
    "family.Family": "FAMILIES",
    "family.require_multiple": "from_pipeline",
    "family.call_default": "from_pipeline",
    "family.unstandardised": "decode",
    "encoding.Encoder": "from_pipeline",
    "encoding.checked_folder": "from_pipeline",
    "families.checked_guidance": "from_pipeline",
    "families.checked_size": "from_pipeline",
    "families.checked_length": "from_pipeline",
    "families.scheduler_shift": "from_pipeline",
    "directions.BinnedDirection": "binned_direction",
    "tasks.pretrain.train_vae": "pretrain_digits",
    "tasks.pretrain.train_flow": "pretrain_digits",
}
"""Steps of something larger, and the name under which tests call it."""


def test_every_public_name_is_in_a_test():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py") if path.name != Path(__file__).name)
    words = set(re.findall(r"\w+", tests))
    names = {f"{module}.{name}": name for module, text in sources().items() for name in public(text)}
    assert [whole for whole, name in names.items() if TESTED_THROUGH.get(whole, name) not in words] == []


def test_control_an_undocumented_name_is_found():
    assert public('def f():\n    "Doc."\nclass A: ...\ndef _g(): ...') == {"f": True, "A": False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Says what it does.",
        "Doc.\n\n    >>> f()\n    ",  # nothing that could fail
        "Doc. No example:",
        "Doc. No example: none. And then more.\n\n    Another paragraph.",
        "Doc. No example: none.\n\n    >>> f()\n    1\n    ",
    ],
)
def test_control_a_function_without_example_or_reason_is_found(text):
    assert unexplained(f'def f():\n    """{text}"""') == ["f"]


@pytest.mark.parametrize(
    "text", ["Doc.\n\n    >>> f()\n    1\n    ", "Doc.\n\n    No example: starts processes.\n    "]
)
def test_control_an_example_or_a_reason_is_enough(text):
    assert unexplained(f'def f():\n    """{text}"""\ndef _g(): ...\nclass A: ...') == []


def test_control_an_undocumented_method_is_found():
    body = "x = 1\n        y = 2\n        return x + y"
    assert undocumented_methods(f"class A:\n    def f(self):\n        {body}") == ["A.f"]
    assert undocumented_methods(f'class A:\n    def f(self):\n        "Doc."\n        {body}') == []
    assert (
        undocumented_methods(f"class A:\n    def f(self):\n        return 1\n    def _g(self):\n        {body}") == []
    )
    assert undocumented_methods(f"class _A:\n    def f(self):\n        {body}") == []


# ---- controls


def controls(source: str) -> list[str]:
    """Tests that are negative controls: `control` in the name, or "negative control" in the body or its comments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            body = (ast.get_source_segment(source, node) or "").lower()
            if "control" in node.name or "negative control" in body:
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_every_test_file_has_a_negative_control(path):
    assert controls(path.read_text())


def test_control_a_file_without_control_is_found():
    assert controls("def test_a():\n    assert True\ndef control(): ...") == []
    assert controls("def test_a():\n    # negative control: none\n    assert True") == ["test_a"]


# ---- pure floors

DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
}
NUMPY_SEEDED = {"Generator", "Philox", "SeedSequence", "PCG64", "BitGenerator", "default_rng"}


def dotted(node: ast.AST) -> list[str]:
    """torch.rand -> ["torch", "rand"]; of x().rand: ["", "rand"]."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return [node.id if isinstance(node, ast.Name) else "", *parts]


def global_randomness(source: str) -> list[str]:
    """Calls that read or seed a generator they were not given."""
    tree, found = ast.parse(source), []
    if "random" in top_level_imports(source):
        found.append("import random")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        path = dotted(node.func)
        keywords = {keyword.arg for keyword in node.keywords}
        name = ".".join(path)
        like = path[-1] in {"rand_like", "randn_like", "randint_like", "dropout"}
        seeding = path[-1] in {"manual_seed", "seed", "set_rng_state"} and path[0] in {"torch", "np", "numpy"}
        unseeded = (
            path[-1] in DRAWS
            and "generator" not in keywords
            and path[:2] not in (["np", "random"], ["numpy", "random"])
        )
        numpy = path[:2] in (["np", "random"], ["numpy", "random"]) and path[-1] not in NUMPY_SEEDED
        numpy = numpy or (path[-1] == "default_rng" and not node.args)
        if like or seeding or unseeded or numpy:
            found.append(name)
    return found


@pytest.mark.parametrize("path", [p for p in FILES if FLOORS.get(name_of(p).split(".")[0], 9) <= 1], ids=name_of)
def test_the_lower_floors_use_no_global_randomness(path):
    assert global_randomness(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3)",
        "torch.rand(3, device=d)",
        "x.normal_()",
        "f(x).uniform_(0, 1)",
        "torch.randn_like(x)",
        "torch.manual_seed(0)",
        "np.random.rand(3)",
        "np.random.default_rng()",
        "numpy.random.seed(1)",
        "import random",
    ],
)
def test_control_global_randomness_is_found(line):
    assert len(global_randomness(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3, generator=g)",
        "x.normal_(generator=g)",
        "np.random.Generator(np.random.Philox(key=1))",
        "g.manual_seed(0)",
        "torch.Generator().manual_seed(0)",
        "randn = 3",
    ],
)
def test_control_given_generators_are_allowed(line):
    assert global_randomness(line) == []


# ---- reductions


def test_masked_mean_is_the_only_reduction_of_losses():
    """House rule 5: no other function of losses.py returns a number for a whole batch."""
    source = (PACKAGE / "losses.py").read_text()
    scalars = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ', ""]' in ast.unparse(node.returns).replace("'", '"')
    ]
    assert scalars == ["masked_mean"]
