"""The command ``treewy``: one sub-command per question, each in a module ``command_<name>.py`` with one function.

A command's module imports at its top what its options need, and the rest inside its function, so that ``treewy --help``
needs neither torch nor transformers.
"""

from __future__ import annotations

import typer

from treewy_inductor.command_bench_tree import bench_tree
from treewy_inductor.command_demo import demo
from treewy_inductor.command_doctor import doctor
from treewy_inductor.command_explain import explain
from treewy_inductor.command_generate import generate
from treewy_inductor.command_memory import memory

app = typer.Typer(
    help="Verify trees of draft tokens on hybrids of attention and linear attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, generate, bench_tree, memory, doctor, explain):
    app.command()(command)
