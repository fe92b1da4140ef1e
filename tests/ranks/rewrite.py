"""Ranks import test modules with pytest's assertion rewriting, so that a failed assert shows its values."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # No bytecode cache: rewritten code must not be found by a plain import of the same file.
        source = self.get_data(self.path)
        tree: Any = ast.parse(source, filename=self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.rpartition(".")[2].startswith("test_"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or "site-packages" in str(spec.origin):
            return None
        spec.loader = _Loader(fullname, os.fspath(spec.loader.path))
        return spec


def install() -> None:
    """Rewrite the asserts of every ``test_*`` module that this process imports from now on."""
    sys.meta_path.insert(0, _Finder())
