#!/usr/bin/env python3
"""From the JSON of cpu.py and gpu.py to tables and plots, and into results/speed.md.

    python benchmarks/speed_page.py runs/bench/cpu.json

puts the tables between the page's marks of that device, and the plot into results/speed/.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, spread

PAGE = Path(__file__).resolve().parent / "results" / "speed.md"


def tables(result: dict) -> str:
    """Markdown: the machine, a table for each case, and the time to an accuracy."""
    state = result["machine"]
    lines = [f"{in_words(state)}.", ""]
    for name, case in result["cases"].items():
        body = [f"It failed: {case['failed']}"] if "failed" in case else table(case)
        lines += [f"**{name}**", "", *body, ""]
    if result["race"]:
        lines += [*race_table(result["race"]), ""]
    return "\n".join(lines).strip() + "\n"


def table(case: dict) -> list[str]:
    """The table of a case: medians over the turns, the ranges of ratios in brackets."""
    head = ["", "", "samples/s", "/ plain loop", "first step", "kept of a sample", "peak"]
    head += ["data", "forward, backward", "optimizer"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for name, what in case["ways"].items():
        reason = case["left_out"].get(name)
        if name in case["samples_per_second"]:
            lines.append(row(case, name, f"{what}; then {reason}" if reason else what))
        else:
            lines.append(f"| {name} | {what} | left out: {reason} |" + " |" * 7)
    best = case.get("best_compile")
    if best is not None:
        over = {name.split(" / ")[0]: times for name, times in case["ratios"].items()
                if name.endswith(" / best torch.compile")}  # fmt: skip
        said = "; ".join(f"{name}: {spread(times)}" for name, times in over.items())
        lines += ["", f'Over the best torch.compile, which is "{best}": {said}.'] if over else []
    return lines


def row(case: dict, name: str, what: str) -> str:
    """The row of a contender that has taken turns; where a figure is missing, the cell is empty."""
    speed = statistics.median(case["samples_per_second"][name])
    against = case["ratios"].get(f"{name} / plain loop")
    times = spread(against) if against else "1" if name == "plain loop" else ""
    kept, peak = case["bytes_kept_per_sample"].get(name), case["peak_bytes"][name]
    cells = [name, what, f"{speed:,.0f}", times]
    cells.append(f"{case['seconds_of_the_first_step'][name]:.1f} s")
    cells.append(f"{kept / 1e6:.2f} MB" if kept else "")
    cells.append(f"{peak / 1e9:.2f} GB" if peak else "")
    shares = case["shares"].get(name, {})
    cells += [
        f"{100 * shares[phase]:.0f} %" if phase in shares else ""
        for phase in ("data", "forward_backward", "optimizer")
    ]
    return "| " + " | ".join(cells) + " |"


def race_table(race: dict) -> list[str]:
    lines = [f"**Time to {race['target']} % of the test pictures: {race['what']}**", ""]
    lines += ["| | seconds to it | at the end | seconds in all |", "| --- |" + " ---: |" * 3]
    for name, curve in race["curves"].items():
        reached, (seconds, accuracy) = race["seconds_to_target"][name], curve[-1]
        first = "not reached" if reached is None else f"{reached:.1f}"
        lines.append(f"| {name} | {first} | {accuracy:.2f} % | {seconds:.1f} |")
    for name, reason in race.get("left_out", {}).items():
        lines.append(f"| {name} | left out: {reason} | | |")
    return lines


def draw(result: dict, path: Path) -> None:
    """Bars of the speed over the plain loop's, and the accuracy over time."""
    from matplotlib.figure import Figure

    cases = [
        (name, case)
        for name, case in result["cases"].items()
        if "plain loop" in case.get("samples_per_second", {})
    ]
    race = result["race"] if result["race"] and result["race"]["curves"] else None
    count = len(cases) + (race is not None)
    figure = Figure(figsize=(5.2 * max(count, 1), 3.6), layout="constrained")
    panels = figure.subplots(1, max(count, 1), squeeze=False)[0]
    for axis, (name, case) in zip(panels, cases, strict=False):
        names = list(case["samples_per_second"])
        values, low, high = [], [], []
        for one in names:
            ratios = case["ratios"].get(
                f"{one} / plain loop", {"median": 1.0, "min": 1.0, "max": 1.0}
            )
            values.append(ratios["median"])
            low.append(ratios["median"] - ratios["min"])
            high.append(ratios["max"] - ratios["median"])
        colours = ["tab:blue" if one.startswith("ours") else "tab:gray" for one in names]
        axis.barh(names[::-1], values[::-1], color=colours[::-1],
                  xerr=[low[::-1], high[::-1]], ecolor="0.3", capsize=2)  # fmt: skip
        for place, value in enumerate(values[::-1]):
            axis.text(0.02, place, f"{value:.2f}", va="center", color="white", fontsize=9)
        axis.set_title(name.split(",")[0], fontsize=10)
        axis.set_xlabel("samples per second / the plain loop's")
        axis.grid(axis="x", alpha=0.3)
    if race:
        axis = panels[-1]
        for name, curve in race["curves"].items():
            seconds, accuracy = zip(*curve, strict=True)
            colour = {"plain loop": "tab:gray", "autocast": "tab:orange"}.get(name, "tab:blue")
            axis.plot(seconds, accuracy, "o-", color=colour, label=name, markersize=4)
        axis.axhline(race["target"], color="tab:red", lw=1, ls=":")
        axis.set_title(race["what"].split(" on ")[0] + ", real pictures", fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("test accuracy (%)")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def replace_section(page: str, device: str, text: str) -> str:
    """The page with `text` between its marks of `device`. Raises ValueError without them."""
    begin, end = f"<!-- {device}: begin -->", f"<!-- {device}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no marks {begin} and {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__)
        return 0 if {"-h", "--help"} & {*words} else 2
    path = Path(words[0])
    result = json.loads(path.read_text())
    device = result["machine"]["device"]
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    shutil.copyfile(path, folder / f"{device}.json")
    draw(result, folder / f"{device}.png")
    text = f"{tables(result)}\n![Speed over the plain loop's](speed/{device}.png)\n"
    PAGE.write_text(replace_section(PAGE.read_text(), device, text))
    print(f"{PAGE}: the tables of the {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
