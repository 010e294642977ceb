"""An explanation as one HTML page: no script, no font, no picture from elsewhere; graphs fold open as SVG and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from treewy_inductor.errors import grouped, layers_of
from treewy_inductor.findings import Explanation, FoundRecurrence, RefusedRegion
from treewy_inductor.report_graph import MOST_NODES, GraphNode, draw
from treewy_inductor.report_style import STYLE
from treewy_inductor.report_text import short_source

COLORS = {
    "query": ("#cfe0ff", "#3b6fe0"),
    "key": ("#ffe3b8", "#d9860a"),
    "value": ("#cdeeda", "#1d9a5b"),
    "log_decay": ("#f3d3ee", "#b13ba0"),
    "decay": ("#f3d3ee", "#b13ba0"),
    "beta": ("#e0d7fb", "#7350d8"),
    "state": ("#d7dce4", "#4a5565"),
}


def render(explanation: Explanation) -> str:
    """Return the page."""
    is_good = bool(explanation.recurrences) and not explanation.refusals
    versions = ", ".join(f"{name} {version}" for name, version in explanation.versions.items())
    sections = [
        f"<h1>{escape(explanation.model)}</h1>",
        f'<div class="verdict {"good" if is_good else "bad"}">{escape(explanation.verdict())}</div>',
        _facts(explanation),
        *map(_refusal, grouped(explanation.refusals)),
    ]
    if explanation.recurrences:
        sections += ["<h2>Recurrences</h2>", _table(explanation), "<h2>Proofs</h2>"]
        sections += [_proof(found, explanation) for found in explanation.recurrences if found.proven_by == found.layer]
    sections.append(
        f"<footer>A recurrence is accepted when running it agrees with its literal rule to {explanation.accept:.0e} "
        f"and every other assignment of roles is off by more than {explanation.margin:.0e}. Hover a node for its source line. "
        f"{escape(versions)}</footer>"
    )
    title = escape(f"treewy: {explanation.model}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _facts(explanation: Explanation) -> str:
    proven = explanation.recurrences
    facts = {
        "recurrences proven": f"{len(proven)} of {len(proven) + len(explanation.refusals)}",
        "nodes, before and after": f"{explanation.nodes_before:,} → {explanation.nodes_after:,}",
        "graphs" if explanation.graphs != 1 else "graph": str(explanation.graphs),
        "short convolutions": str(explanation.convolutions),
        "seconds to trace": f"{explanation.compile_seconds - explanation.rewrite_seconds:.1f}",
        "seconds to prove and rewrite": f"{explanation.rewrite_seconds:.1f}",
    }
    if proven:
        kept, states = sum(found.bytes_kept for found in proven), sum(found.bytes_of_state for found in proven)
        facts["less memory a draft node than a copy of the state"] = f"{states / kept:.0f}×"
    cells = "".join(f'<div class="fact"><b>{escape(value)}</b><span>{name}</span></div>' for name, value in facts.items())
    return f'<div class="facts">{cells}</div>'


def _refusal(group: list[RefusedRegion]) -> str:
    refusal = group[0]
    code = f"<pre>{escape(refusal.code)}</pre>" if refusal.code else ""
    code += "".join(f'<p class="mono">called at {escape(caller)}</p>' for caller in refusal.callers)
    return (
        f'<div class="refusal"><b>Refused: {escape(layers_of(group))}</b><p class="mono">{escape(refusal.source)}</p>{code}'
        f"<p>{escape(refusal.reason)}</p>"
        f"<p>Node <code>{escape(refusal.node)}</code> (<code>{escape(refusal.op)}</code>)</p>"
        f"{_graph('Between its states', refusal.graph)}</div>"
    )


def _table(explanation: Explanation) -> str:
    rows = "".join(
        f"<tr><td>{found.layer}</td><td><code>{escape(found.module)}</code><br>"
        f'<span class="soft mono">{escape(short_source(found.source))}</span></td>'
        f"<td>{escape(found.rule)}</td>"
        f'<td class="number">{f"{found.error:.1e}" if found.proven_by == found.layer else f"as layer {found.proven_by}"}</td>'
        f'<td class="number">{found.nodes_before} → {found.nodes_after}</td>'
        f'<td class="number">{found.bytes_kept:,}</td><td class="number">{found.bytes_of_state:,}</td>'
        f'<td class="number">{found.bytes_of_state / found.bytes_kept:.0f}×</td></tr>'
        for found in explanation.recurrences
    )
    heads = "<th>layer</th><th>where</th><th>proven to be</th>" + "".join(
        f'<th class="number">{name}</th>' for name in ("error", "nodes", "bytes a node", "bytes a state", "saved")
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _proof(found: FoundRecurrence, explanation: Explanation) -> str:
    layers = [str(other.layer) for other in explanation.recurrences if other.proven_by == found.layer]
    roles = "".join(
        f"<tr><td>{_swatch(role)}{escape(role)}</td><td><code>{escape(node)}</code></td></tr>"
        for role, node in found.roles.items()
    )
    widest = max(found.bytes_of_state, found.bytes_kept)
    bars = "".join(
        f'<span>{name}</span><div class="bar {kind}" style="width:{100 * size / widest:.2f}%"></div>'
        f'<span class="number">{size:,} B</span>'
        for name, kind, size in (
            ("a copy of the state", "state", found.bytes_of_state),
            ("kept instead", "", found.bytes_kept),
        )
    )
    return (
        f"<details open><summary>{escape(found.module) or f'Layer {found.layer}'} "
        f'<span class="soft">proven in {found.proof_seconds:.2f} s, holds for layer {", ".join(layers)}</span></summary><div>'
        f'<p class="mono">{escape(found.source)}</p><pre>{escape(found.code)}</pre>'
        f"<h3>Roles</h3><table>{roles}</table>"
        f"<h3>Error of the proof</h3>{_gauge(found, explanation)}"
        f'<h3>Memory of one draft node, one row</h3><div class="bars">{bars}</div>'
        f"{_graph('Before', found.before)}{_graph('After', found.after)}</div></details>"
    )


def _swatch(role: str) -> str:
    fill, line = COLORS.get(role, ("#ffffff", "#14181f"))
    return f'<span class="swatch" style="background:{fill};border-color:{line}"></span>'


def _gauge(found: FoundRecurrence, explanation: Explanation) -> str:
    """Draw both errors on one logarithmic scale, with the two bars they must stay beyond."""
    low, high, width = -17, 2, 760
    error, runner_up = found.error, found.runner_up

    def place(value: float) -> float:
        return 10 + (width - 20) * (min(max(math.log10(value) if value > 0 else low, low), high) - low) / (high - low)

    accept, margin = place(explanation.accept), place(explanation.margin)
    ticks = "".join(f'<text x="{place(10.0**power):.0f}" y="50">1e{power}</text>' for power in range(-16, 2, 4))
    marks = [(error, "var(--good)", f"proven {error:.1e}")]
    if math.isfinite(runner_up):
        marks.append((runner_up, "var(--bad)", f"next best {runner_up:.1e}"))
    dots = "".join(
        f'<circle cx="{place(value):.0f}" cy="26" r="6" fill="{color}"/>'
        f'<text class="name" x="{place(value):.0f}" y="12">{name}</text>'
        for value, color, name in marks
    )
    return (
        f'<svg class="gauge" viewBox="-40 0 {width + 80} 54" width="{width + 80}" style="max-width:100%" role="img" '
        f'aria-label="proof error {error:.1e}, next best {runner_up:.1e}">'
        f'<rect x="10" y="20" width="{accept - 10:.0f}" height="12" rx="6" fill="var(--good-bg)"/>'
        f'<rect x="{accept:.0f}" y="20" width="{margin - accept:.0f}" height="12" fill="var(--line)"/>'
        f'<rect x="{margin:.0f}" y="20" width="{width - 10 - margin:.0f}" height="12" rx="6" fill="var(--bad-bg)"/>'
        f"{ticks}{dots}</svg>"
    )


def _graph(title: str, nodes: Sequence[GraphNode]) -> str:
    if not nodes:
        return ""
    picture = draw(nodes)
    canvas = (
        f'<div class="canvas">{picture}</div>' if picture else f'<p class="soft">More than {MOST_NODES} nodes: no picture.</p>'
    )
    return (
        f'<details><summary>{title} <span class="soft">{len(nodes)} nodes</span></summary><div>{canvas}'
        f"<details><summary>As text</summary><div><pre>{_listing(nodes)}</pre></div></details></div></details>"
    )


def _listing(nodes: Sequence[GraphNode]) -> str:
    lines, last = [], ""
    for node in nodes:
        if node.code and (node.source, node.code) != last:
            lines.append(f'<span class="source"># {escape(short_source(node.source))}: {escape(node.code)}</span>')
            last = (node.source, node.code)  # type: ignore[assignment]
        role = f"  # {node.role}" if node.role else ""
        lines.append(
            f'{escape(node.name)}: <span class="shape">{escape(node.shape)}</span> = '
            f'<span class="op">{escape(node.op)}</span>({escape(", ".join(node.inputs))})<b>{role}</b>'
        )
    return "\n".join(lines)
