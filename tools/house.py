"""Measures of the package that packing lines cannot change.

    python tools/house.py src/dpfl [--json]
    python tools/house.py src/dpfl --record tools/limits.json    # write these numbers as limits
    python tools/house.py src/dpfl --limits tools/limits.json --allowance tools/allowance.json

The last exits with 1 where a number is above its limit and what is allowed on top. Counts tokens
and names of the syntax tree, never lines. A token is what Python's tokenizer yields, without
newlines, indents, comments and docstrings. Standard library only; nothing is imported from the
package that is measured.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
VAGUE = ("own", "found", "one", "given", "told", "kept", "asked", "said", "place", "known", "good")
# What Flower documents as public (its message API); anything else under flwr. is private.
PUBLIC_FLOWER = {
    "flwr",
    "flwr.app",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
}
LIMITED = (
    "tokens",
    "import tokens",
    "classes at depth >= 4",
    "to_dict",
    "from_dict",
    "__post_init__",
    "private flwr imports",
    "private flwr files",
    "tampering",
    "vague names given, sum",
    "tuple packs",
    "single-use private helpers",
)
"""What --limits compares, beside the tokens of every package."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


class Source:
    """One file: its syntax tree, and its tokens without layout, comments and docstrings."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.docstrings = set(_docstring_positions(self.tree))
        self.tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type not in SKIPPED and token.start not in self.docstrings
        ]

    @property
    def package(self) -> str:
        """The first folder; files beside it count as one package."""
        first, *rest = self.name.split("/")
        return first if rest else "(root)"

    def tokens_within(self, nodes: Sequence[ast.stmt]) -> int:
        """How many tokens belong to some statements."""
        spans = [
            ((n.lineno, _column(self, n)), (n.end_lineno or n.lineno, n.end_col_offset or 0))
            for n in nodes
        ]
        lines = self.text.splitlines()

        def characters(line: int, offset: int) -> int:
            return len(lines[line - 1].encode()[:offset].decode(errors="replace"))

        exact = [(start, (end[0], characters(*end))) for start, end in spans]
        return sum(any(low <= t.start < high for low, high in exact) for t in self.tokens)


def _column(source: Source, node: ast.stmt) -> int:
    line = source.text.splitlines()[node.lineno - 1]
    return len(line.encode()[: node.col_offset].decode(errors="replace"))


def _docstring_positions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, SCOPES) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    yield first.lineno, first.col_offset


# -- measures --------------------------------------------------------------------------------------


def tokens_per_package(sources: list[Source]) -> dict[str, dict[str, int]]:
    """Files, tokens and lines of every package, the largest first."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "tokens": 0, "lines": 0})
    for source in sources:
        row = rows[source.package]
        row["files"] += 1
        row["tokens"] += len(source.tokens)
        row["lines"] += source.text.count("\n")
    return dict(sorted(rows.items(), key=lambda item: -item[1]["tokens"]))


def import_tokens(sources: list[Source]) -> int:
    """Tokens of import statements."""
    total = 0
    for source in sources:
        imports = [n for n in ast.walk(source.tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        total += source.tokens_within(imports)
    return total


def inheritance(sources: list[Source]) -> dict[str, int]:
    """Depth of every class among the package's own: a class without a base of its own has 1."""
    bases: dict[str, set[str]] = defaultdict(set)
    where: dict[str, str] = {}
    for source in sources:
        aliases = {
            alias.asname: alias.name
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                where[node.name] = source.name
                for base in node.bases:
                    name = _last_name(base)
                    bases[node.name].add(aliases.get(name, name))

    def depth(name: str, seen: tuple[str, ...] = ()) -> int:
        above = [base for base in bases[name] if base in where and base not in (*seen, name)]
        return 1 + max((depth(base, (*seen, name)) for base in above), default=0)

    return {f"{name} ({where[name]})": depth(name) for name in where}


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def definitions(sources: list[Source], names: set[str]) -> Iterator[tuple[str, str, int]]:
    """Where functions of some names are defined: name, file, line."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names:
                yield node.name, source.name, node.lineno


def private_flower(sources: list[Source]) -> Iterator[tuple[str, int, str]]:
    """Imports of what Flower does not document as public: file, line, module."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                if node.module not in PUBLIC_FLOWER:
                    yield source.name, node.lineno, f"{node.module}: {len(node.names)} names"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("flwr.") and alias.name not in PUBLIC_FLOWER:
                        yield source.name, node.lineno, alias.name


def tampering(sources: list[Source]) -> Iterator[tuple[str, int, str]]:
    """What changes other code's insides: mock, __dict__[...], __kwdefaults__, __class__ = ..."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                if any(name.startswith("unittest.mock") or name == "mock" for name in names):
                    yield source.name, node.lineno, "unittest.mock"
            elif isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    text = ast.unparse(target)
                    for inside in ("__dict__[", "__kwdefaults__", "__class__", "__defaults__"):
                        if inside in text:
                            yield source.name, node.lineno, text


def vague_names(sources: list[Source]) -> tuple[Counter[str], int]:
    """How often a vague word is *given* as a name, and how many names are given at all."""
    vague: Counter[str] = Counter()
    names = 0
    for source in sources:
        for node in ast.walk(source.tree):
            bound: list[str] = []
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound = [node.id]
            elif isinstance(node, ast.arg):
                bound = [node.arg]
            elif isinstance(node, SCOPES[:3]):
                bound = [node.name]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                bound = [node.attr]
            for name in bound:
                names += 1
                if name.strip("_") in VAGUE:
                    vague[name.strip("_")] += 1
    return vague, names


def vague_uses(sources: list[Source]) -> int:
    """How often a vague word stands in the code as a name."""
    return sum(
        token.type == tokenize.NAME and token.string.strip("_") in VAGUE
        for source in sources
        for token in source.tokens
    )


def tuple_packs(sources: list[Source]) -> tuple[int, int]:
    """Assignments of two or more independent values at once, and logical lines (statements)."""
    packs = statements = 0
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.stmt):
                statements += 1
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                for target in node.targets:
                    if not isinstance(target, ast.Tuple) or len(target.elts) < 2:
                        continue
                    written = {ast.unparse(element) for element in target.elts}
                    used = {
                        part.id
                        for element in node.value.elts
                        for part in ast.walk(element)
                        if isinstance(part, ast.Name)
                    }
                    if not written & used:  # a, b = b, a needs the tuple
                        packs += 1
    return packs, statements - len(sources)


def checks(sources: list[Source]) -> dict[str, int]:
    """How errors are raised, and how many asserts narrow a type only."""
    counts: Counter[str] = Counter()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _last_name(node.func) == "check":
                counts["check(...) calls"] += 1
            elif isinstance(node, ast.Raise):
                counts["raise statements"] += 1
            elif isinstance(node, ast.Assert):
                counts["assert statements"] += 1
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id in ("problem", "remedy") for t in node.targets
            ):
                counts["problem = / remedy = assignments"] += 1
    return dict(counts)


def single_use_helpers(sources: list[Source]) -> int:
    """Private functions and methods that are named exactly once outside their definition."""
    uses: Counter[str] = Counter()
    private: Counter[str] = Counter()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                if not node.name.startswith("__"):
                    private[node.name] += 1
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return sum(count for name, count in private.items() if count == 1 and uses[name] == 1)


def measure(root: Path) -> dict[str, object]:
    """All measures of the package in a folder."""
    sources = [Source(path, root) for path in sorted(root.rglob("*.py"))]
    tokens = sum(len(source.tokens) for source in sources)
    depths = inheritance(sources)
    deep = {name: depth for name, depth in sorted(depths.items()) if depth >= 4}
    serial = Counter(name for name, _, _ in definitions(sources, {"to_dict", "from_dict"}))
    vague, names = vague_names(sources)
    packs, statements = tuple_packs(sources)
    imports = import_tokens(sources)
    return {
        "packages": tokens_per_package(sources),
        "files": len(sources),
        "tokens": tokens,
        "statements": statements,
        "tokens per statement": round(tokens / statements, 2),
        "import tokens": imports,
        "import share": round(imports / tokens, 4),
        "classes": len(depths),
        "classes at depth >= 4": len(deep),
        "deepest": max(depths.values(), default=0),
        "deep classes": deep,
        "to_dict": serial["to_dict"],
        "from_dict": serial["from_dict"],
        "__post_init__": sum(1 for _ in definitions(sources, {"__post_init__"})),
        "private flwr imports": [f"{p}:{n} {what}" for p, n, what in private_flower(sources)],
        "private flwr files": sorted({p for p, _, _ in private_flower(sources)}),
        "tampering": [f"{p}:{n} {what}" for p, n, what in tampering(sources)],
        "vague names given": dict(vague.most_common()),
        "vague names given, sum": sum(vague.values()),
        "names given": names,
        "vague per 1000 names": round(1000 * sum(vague.values()) / names, 1),
        "vague words used": vague_uses(sources),
        "tuple packs": packs,
        "tuple packs per 1000 statements": round(1000 * packs / statements, 1),
        "errors": checks(sources),
        "single-use private helpers": single_use_helpers(sources),
    }


def limited(result: dict[str, object]) -> dict[str, float]:
    """The measures that may only fall, each as one number."""
    packages: dict[str, dict[str, int]] = result["packages"]  # type: ignore[assignment]
    numbers: dict[str, float] = {
        f"tokens of {name}": row["tokens"] for name, row in packages.items()
    }
    for name in LIMITED:
        value = result[name]
        numbers[name] = value if isinstance(value, int | float) else len(value)  # type: ignore[arg-type]
    return numbers


def excesses(
    numbers: dict[str, float], limits: dict[str, float], allowance: dict[str, float]
) -> list[str]:
    """One sentence for each number above its limit and what is allowed on top.

    A package that was not recorded has no limit, but counts in the total.
    """
    sentences = []
    for name, number in numbers.items():
        if name not in limits:
            continue
        per_package = name.startswith("tokens of ")
        extra = allowance.get("tokens" if per_package else name, 0)
        if number > limits[name] + extra:
            limit = f"{limits[name]:,} recorded and {extra:,} allowed on top"
            sentences.append(f"{name}: {number:,} exceeds {limit}")
    return sentences


def main() -> None:
    """Print the measures, record them, or compare them with limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the package's folder, for example src/dpfl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", type=Path, help="write the numbers of today as limits")
    parser.add_argument("--limits", type=Path, help="compare with recorded limits")
    parser.add_argument("--allowance", type=Path, help="what may be added to the limits")
    arguments = parser.parse_args()
    root = arguments.path
    if not (root / "__init__.py").exists() and (root / "src").exists():
        root = next((p.parent for p in sorted((root / "src").glob("*/__init__.py"))), root)
    result = measure(root)
    if arguments.record:
        arguments.record.write_text(json.dumps(limited(result), indent=1) + "\n")
    if arguments.limits:
        limits = json.loads(arguments.limits.read_text())
        allowance = json.loads(arguments.allowance.read_text()) if arguments.allowance else {}
        sentences = excesses(limited(result), limits, allowance)
        for sentence in sentences:
            print(sentence)
        raise SystemExit(bool(sentences))
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'package':14}{'files':>7}{'tokens':>9}{'lines':>8}")
    for name, row in result["packages"].items():  # type: ignore[attr-defined]
        print(f"{name:14}{row['files']:7}{row['tokens']:9,}{row['lines']:8,}")
    for name, value in result.items():
        if name == "packages":
            continue
        if isinstance(value, list):
            print(f"{name}: {len(value)}")
            for line in value:
                print(f"    {line}")
        elif isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{key} {number}" for key, number in value.items()))
        else:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


if __name__ == "__main__":
    main()
