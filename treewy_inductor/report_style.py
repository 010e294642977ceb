"""The style sheet of the HTML report: system fonts, light and dark, nothing loaded from anywhere."""

STYLE = """
:root { --ink:#1b2330; --soft:#5d6878; --line:#dde2ea; --paper:#ffffff; --panel:#f6f8fb; --good:#0f7b4f; --good-bg:#e5f5ed;
  --bad:#b3261e; --bad-bg:#fdecea; --accent:#3457d5; --box:#eef1f6; --edge:#aab4c3; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6eaf1; --soft:#98a3b5; --line:#2f3846; --paper:#12161d; --panel:#1a202a;
  --good:#5fd39b; --good-bg:#12301f; --bad:#ff8a80; --bad-bg:#3a1613; --accent:#8ea6ff; --box:#242c39; --edge:#566175; } }
* { box-sizing:border-box }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
main { max-width:1120px; margin:0 auto; padding:28px 24px 60px }
h1 { font-size:26px; margin:0 0 4px; letter-spacing:-.01em } h2 { font-size:18px; margin:34px 0 10px }
h3 { font-size:15px; margin:18px 0 6px } p { margin:6px 0 } .soft { color:var(--soft) }
code, pre, .mono, svg text { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace } code { font-size:.9em }
.verdict { display:inline-block; margin:10px 0 6px; padding:8px 14px; border-radius:8px; font-weight:600 }
.verdict.good { color:var(--good); background:var(--good-bg) } .verdict.bad { color:var(--bad); background:var(--bad-bg) }
.facts { display:flex; flex-wrap:wrap; gap:12px; margin:14px 0 }
.fact { flex:1 1 150px; padding:12px 14px; border:1px solid var(--line); border-radius:10px; background:var(--panel) }
.fact b { display:block; font-size:20px; font-variant-numeric:tabular-nums } .fact span { color:var(--soft); font-size:13px }
.wide { overflow-x:auto } table { border-collapse:collapse; width:100%; font-size:14px }
th { text-align:left; font-weight:600; color:var(--soft); font-size:12.5px; padding:6px 12px 6px 0;
  border-bottom:1px solid var(--line) }
td { padding:7px 12px 7px 0; border-bottom:1px solid var(--line); vertical-align:top } tr:last-child td { border-bottom:0 }
.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
details { border:1px solid var(--line); border-radius:10px; margin:10px 0; background:var(--panel) }
summary { cursor:pointer; padding:10px 14px; font-weight:600 } summary .soft { font-weight:400 }
details > div { padding:2px 14px 14px } details details { background:var(--paper) }
.refusal { border:1px solid var(--bad); border-left-width:5px; border-radius:10px; padding:12px 16px; margin:12px 0;
  background:var(--bad-bg) }
pre { margin:8px 0; padding:10px 12px; overflow:auto; background:var(--paper); border:1px solid var(--line);
  border-radius:8px;
  font-size:12.5px; line-height:1.45; max-height:560px }
pre .source { color:var(--soft); font-style:italic } pre .op { color:var(--accent) } pre .shape { color:var(--soft) }
.canvas { overflow:auto; max-height:640px; border:1px solid var(--line); border-radius:8px; background:var(--paper);
  padding:4px }
.canvas svg { display:block; margin:0 auto } .canvas svg.fits { max-width:100%; height:auto }
.edge { fill:none; stroke:var(--edge); stroke-width:1.2 } .box rect { fill:var(--box); stroke:var(--edge); stroke-width:1 }
.box text { fill:var(--ink); font-size:11px; text-anchor:middle } .box .detail { fill:var(--soft); font-size:9.5px }
.treewy rect { fill:var(--accent); stroke:var(--accent) } .treewy text, .treewy .detail { fill:#fff }
@media (prefers-color-scheme: dark) { .treewy text, .treewy .detail { fill:#10131a } }
[class*="role-"] rect { stroke-width:2 } [class*="role-"] text { font-weight:700; fill:#14181f }
  [class*="role-"] .detail { font-weight:400; fill:#3b4351 }
.role-query rect { fill:#cfe0ff; stroke:#3b6fe0 } .role-key rect { fill:#ffe3b8; stroke:#d9860a }
  .role-value rect { fill:#cdeeda; stroke:#1d9a5b }
.role-log_decay rect, .role-decay rect { fill:#f3d3ee; stroke:#b13ba0 } .role-beta rect { fill:#e0d7fb; stroke:#7350d8 }
.role-refused rect { fill:#fdecea; stroke:#b5221b }
.role-state rect { fill:#d7dce4; stroke:#4a5565 } .role-output rect, .role-final_state rect { fill:#fff; stroke:#14181f }
.swatch { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; border:2px solid;
  vertical-align:-1px }
.gauge text { fill:var(--soft); font-size:10px; text-anchor:middle } .gauge .name { fill:var(--ink); font-size:11px }
.bar { height:14px; border-radius:4px; background:var(--accent); min-width:2px } .bar.state { background:var(--edge) }
.bars { display:grid; grid-template-columns:max-content 1fr max-content; gap:6px 12px; align-items:center; margin:8px 0 }
footer { margin-top:40px; color:var(--soft); font-size:13px; border-top:1px solid var(--line); padding-top:12px }
"""
