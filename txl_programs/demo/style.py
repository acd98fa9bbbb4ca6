"""The style of the page: system fonts, and colours that are mixed with the light or dark colours of the page."""

CSS = """
.gradio-container { --hot: #d55e00; --cool: #0072b2; --help: #009e73; --harm: #cc79a7;
  --line: var(--border-color-primary); --soft: color-mix(in srgb, var(--body-text-color) 68%, transparent);
  width: 100%; max-width: 1180px !important; margin: 0 auto !important; }
#title h1 { font-size: 1.7rem; font-weight: 700; letter-spacing: -.01em; margin: .4rem 0 0; padding-bottom: .5rem;
  border-bottom: 3px solid; border-image: linear-gradient(90deg, var(--cool), var(--help), var(--hot)) 1; }
#about { font-size: 1.02rem; line-height: 1.55; color: var(--soft); max-width: 52rem; }
#about strong { color: var(--body-text-color); }
button[role=tab] { font-size: 1rem; font-weight: 600; }
.beside { width: auto !important; min-width: 0 !important; flex: 0 0 auto !important; }
button.lg { white-space: nowrap; width: auto; min-width: 5.5rem !important; flex: 0 0 auto !important;
  padding-inline: 1.1rem !important; }
.dark .gradio-container, .gradio-container.dark { --hot: #ff8c42; --cool: #56b4e9; --help: #2bc49a; --harm: #e59ac3; }
.pictures { overflow: visible !important; }
.pictures h3 { margin: 0 0 .5rem; font-size: 1.05rem; font-weight: 600; }
.pictures h4 { margin: 1rem 0 .5rem; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
.sides { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.5rem; }
@media (max-width: 760px) { .sides { grid-template-columns: minmax(0, 1fr); } }
.pictures section { min-width: 0; }
.notice { padding: .6rem .9rem; border-left: 3px solid var(--harm); background: var(--background-fill-secondary);
  overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .85rem; margin: .35rem 0; }
.facts { margin: .3rem 0 .7rem; display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; font-size: .95rem; }
.facts b { font-variant-numeric: tabular-nums; }

.tokens, .written { font-family: var(--font-mono); font-size: .95rem; line-height: 1.75; white-space: pre-wrap;
  overflow-wrap: anywhere; padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 8px;
  background: var(--background-fill-primary); max-height: 26rem; overflow-y: auto; }
.token { unicode-bidi: isolate; border-radius: 3px; padding: .12em 0;
  background: color-mix(in srgb, var(--hot) calc(var(--a) * 85%), transparent); }
.token.help { background: color-mix(in srgb, var(--help) calc(var(--a) * 85%), transparent); }
.token.harm { background: color-mix(in srgb, var(--harm) calc(var(--a) * 85%), transparent); }
.token.first { color: var(--soft); background: none; }
.token.memory { text-decoration: underline 2px color-mix(in srgb, var(--cool) 60%, transparent);
  text-underline-offset: .3em; }
.token.segment { border-left: 4px solid var(--cool); margin-left: 2px; padding-left: 2px; }
.token.asked { outline: 2px solid var(--cool); outline-offset: 1px; }
.pictures [data-pick] { cursor: pointer; }
.token[data-pick]:hover, .token[data-pick]:focus-visible { outline: 2px solid var(--cool); }
.legends { display: flex; flex-wrap: wrap; column-gap: 2rem; }
.legend { display: flex; align-items: center; gap: .5rem; font-size: .85rem; margin: .4rem 0 !important;
  color: var(--soft); }
.scale { width: 7rem; height: .7rem; border-radius: 3px; border: 1px solid var(--line);
  background: linear-gradient(90deg, transparent, var(--hot)); }
.scale.help { background: linear-gradient(90deg, transparent, var(--help)); }
.scale.harm { background: linear-gradient(90deg, transparent, var(--harm)); width: 4rem; }

.samples > div { margin-bottom: .8rem; }
.written .prompt { color: var(--soft); }
.cursor { display: inline-block; width: .5em; height: 1.1em; vertical-align: text-bottom; background: var(--hot); }

.bars { display: grid; gap: .2rem; max-width: 36rem; margin: .3rem 0 .8rem; }
.bars .line { display: grid; grid-template-columns: 9.5rem 1fr 6rem; gap: .8rem;
  align-items: center; padding: .1rem .4rem; border-radius: 4px; }
.bars .chosen { outline: 2px solid var(--cool); }
.bars .name { font-family: var(--font-mono); white-space: pre; overflow: hidden; text-overflow: ellipsis; }
.bars .bar { height: .8rem; background: var(--background-fill-secondary); border-radius: 3px; overflow: hidden; }
.bars .bar span { display: block; height: 100%; }
.bars .cool { background: var(--cool); } .bars .help { background: var(--help); }
.bars .said { text-align: right; font-variant-numeric: tabular-nums; }

.picture { overflow-x: auto; margin: .5rem 0; }
.picture svg { display: block; }
.picture.at-end { direction: rtl; } .picture.at-end svg { direction: ltr; margin-right: auto; }
.picture text { fill: var(--body-text-color); font-family: var(--font-mono); font-size: 12px; }
.picture .column { font-size: var(--size); }
.picture text.chosen { font-weight: 700; fill: var(--cool); }
.picture text[data-pick]:hover { text-decoration: underline; }
.picture rect.hot { fill: color-mix(in srgb, var(--hot) calc(var(--a) * 100%), transparent); }
.picture line.memory { stroke: var(--cool); stroke-width: 2; }
.picture .item { stroke: var(--line); fill: color-mix(in srgb, var(--hot) calc(var(--a) * 90%), transparent); }
.picture .item.asked { stroke: var(--cool); stroke-width: 3; }
.picture .pick:hover .item { stroke: var(--cool); }
.picture .pick text { font-size: 16px; font-family: var(--font); }

.chips { display: flex; flex-wrap: wrap; align-items: center; gap: .3rem; margin: .35rem 0; font-size: .85rem;
  color: var(--soft); }
.chip { border: 1px solid var(--line); border-radius: 999px; padding: .05rem .6rem; color: var(--body-text-color);
  background: var(--background-fill-primary); font-size: .85rem; font-weight: 400; margin: 0 !important; }
.chip:hover, .chip.chosen { border-color: var(--cool); }
.chip.chosen { background: color-mix(in srgb, var(--cool) 25%, transparent); }

.targets { border-collapse: collapse; min-width: 24rem; border: 0 !important; }
.targets tr { border: 0 !important; }
.targets th, .targets td { text-align: left; padding: .3rem .9rem; border: 0 !important;
  border-bottom: 1px solid var(--line) !important; }
.targets .target { font-family: var(--font-mono); white-space: pre-wrap; overflow-wrap: anywhere; }
.targets tr[data-pick]:hover { background: var(--background-fill-secondary); }

.marked { font-size: 1.15rem; line-height: 2.3; margin: 0; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.marked mark { --kind: var(--cool); color: inherit; padding: .2em .3em; border-radius: 5px;
  box-decoration-break: clone; -webkit-box-decoration-break: clone;
  background: color-mix(in srgb, var(--kind) 28%, transparent); }
.marked small { font-size: .68rem; margin-left: .4em; color: var(--soft); white-space: nowrap; }
.marked .kind1 { --kind: var(--hot); } .marked .kind2 { --kind: var(--help); } .marked .kind3 { --kind: var(--harm); }
.marked .kind4 { --kind: #e69f00; } .marked .kind5 { --kind: #8e6bbf; }
progress { appearance: none; vertical-align: middle; width: 8rem; height: .5rem; border: 0; border-radius: 4px;
  overflow: hidden; background: var(--background-fill-secondary); }
progress::-webkit-progress-bar { background: var(--background-fill-secondary); }
progress::-webkit-progress-value { background: var(--cool); } progress::-moz-progress-bar { background: var(--cool); }

@media (max-width: 600px) {
  #title h1 { font-size: 1.35rem; }
  .tokens { font-size: 1.1rem; line-height: 2.1; padding: .6rem .7rem; }
  .token { padding: .3em .05em; }
  .bars .line { grid-template-columns: 6.5rem 1fr 4.6rem; gap: .5rem; }
  .facts { flex-direction: column; }
}
"""
