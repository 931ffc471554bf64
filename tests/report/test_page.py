"""The report's page, opened and clicked through in a headless Chromium as a reader does."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from flowjax.config import load_run, save_run
from flowjax.monitor.diagnosis import RULES
from flowjax.monitor.held_out import HeldOutEpisode, write_held_out
from flowjax.monitor.metrics import MetricsWriter
from flowjax.monitor.transcripts import held_out_path, read_lines, write_lines
from flowjax.report.__main__ import PageHandler, main
from tests.report.browser import CHROMIUM, Browser, browser
from tests.report.recorded import CANVAS, record_run

STEPS = 200
WIDTHS = {"desktop": 1280, "tablet": 820, "phone": 390}
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium (launch/test.sh does)")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    run = record_run(tmp_path_factory.mktemp("runs") / "sokoban-nano", steps=STEPS)
    assert main([str(run)]) == 0
    return run / "report.html"


def visit(work: Callable[[Browser], Awaitable[None]]) -> None:
    """Do something with a browser; no script may have failed, and nothing may have gone to a network."""

    async def scenario() -> None:
        async with browser() as opened:
            await work(opened)
            assert opened.errors == []
            assert [url for url in opened.requests if not url.startswith(("file:", "data:", "about:", "blob:"))] == []

    asyncio.run(scenario())


def test_the_page_is_small_and_has_little_to_lay_out(page: Path):
    """Counted, not timed: 4,400 nodes open within 0.2 s on a core of an AMD EPYC, and in 2 s on one a tenth as fast."""
    assert page.stat().st_size < 20 * 2**20

    async def open_it(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.call("Performance.enable")
        await opened.open(page)
        metrics = {each["name"]: each["value"] for each in (await opened.call("Performance.getMetrics"))["metrics"]}
        assert 1000 < metrics["Nodes"] < 6000, metrics
        assert 0 < metrics["LayoutCount"] < 10, metrics

    visit(open_it)


def test_a_chart_compares_what_is_smoothed_alike(page: Path):
    """A long and a short run are both smoothed; next to a mean over seeds, which is not, nothing is."""
    ramp = "Array.from({length: N}, (_, i) => i)"
    long, short = ("{label: 'N', x: A, y: A.map(i => i % 2)}".replace("A", ramp).replace("N", n) for n in ("40", "9"))
    seeds = long.replace("y:", f"band: true, low: {ramp}, high: {ramp}, y:").replace("N", "40")
    thin = "lineChart({{title: 'T', series: [{}, {}]}}).querySelectorAll('polyline[opacity]').length"

    async def read(opened: Browser) -> None:
        await opened.open(page)
        assert await opened.run(thin.format(long, short)) == 2
        assert await opened.run(thin.format(long, seeds)) == 0
        assert "A bold line over a thin one is the mean of the last 10 steps" in await opened.text()

    visit(read)


def test_values_that_are_not_finite_cut_a_line_and_are_read_out(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=2)
    for step, entropy in enumerate((0.3, 0.3, float("nan"), 0.3, 0.3, float("nan"), float("nan")), 3):
        MetricsWriter(run).write("train", step=step, policy="agent", entropy=entropy, never=float("nan"))
    assert main([str(run)]) == 0
    chart = "[...document.querySelectorAll('.chart')].find(c => c.textContent.startsWith('Entropy'))"

    async def read(opened: Browser) -> None:
        await opened.open(run / "report.html")
        assert await opened.run(f"{chart}.querySelectorAll('polyline').length") == 2, "before and after a nan"
        assert await opened.run(f"{chart}.querySelector('output').textContent") == "Step 9: not finite (nan)"
        labels = await opened.run(f"[...{chart}.querySelectorAll('svg > text')].map(t => t.textContent)")
        assert {"2", "8"} <= set(labels), "the scale has the steps whose values are not finite"
        never = "lineChart({title: 'N', series: [...trained('entropy'), ...trained('never')].slice(FROM)})"
        readout = f"{never}.querySelector('output').textContent"
        assert await opened.run(readout.replace("FROM", "1")) == "Step 9: not finite (nan)"
        assert (await opened.run(readout.replace("FROM", "0"))).count("not finite (nan)") == 2
        spoken = await opened.run(f"{never}.querySelector('svg').getAttribute('aria-label')".replace("FROM", "1"))
        assert spoken.startswith("N: finite at no step.")
        columns = "[{x: [1, 2, 3], y: [1, 1, 1]}, {x: [1, 2, 3], y: [3, 'nan', 3]}]"
        assert (await opened.run(f"banded({columns}).y")) == [2, "nan", 2]
        await opened.run("document.querySelector('details:has(#step)').open = true")
        assert "Entropy\tnot finite (nan)" in await opened.text()

    visit(read)


def test_ticks_are_told_apart_and_a_single_step_has_one(page: Path):
    async def read(opened: Browser) -> None:
        await opened.open(page)

        async def ticks(x: list[int], y: list[float]) -> list[str]:
            chart = f"lineChart({{title: 'T', series: [{{label: 'a', x: {x}, y: {y}}}]}})"
            return await opened.run(f"[...{chart}.querySelectorAll('svg > text')].map(t => t.textContent)")

        assert await ticks([1, 2], [0.99979, 1.00055]) == ["0.9998", "1", "1.0002", "1.0004", "1", "2"]
        assert await ticks([1, 2], [100100, 100200]) == ["1.0010e+5", "1.0015e+5", "1.0020e+5", "1", "2"]
        assert await ticks([1, 2], [0.051, 0.135]) == ["0.1", "1", "2"], "an axis with one tick"
        assert await ticks([1, 2], [1.21, 1.29999]) == ["1.25", "1", "2"]
        assert await ticks([7], [0]) == ["0", "0.2", "0.4", "7"], "a staleness of 0 is not below 0"

    visit(read)


def test_a_start_of_which_little_is_known_is_shown(tmp_path: Path):
    """The kept runs of docs/results have no command, and their page was empty."""
    run = record_run(tmp_path / "kept", steps=12)
    starts = [
        {"ended_s": 9.0},
        {"started_s": 1e9, "ended_s": 1e9 + 60},
        {"started_s": 2e9, "command": ["python", "-m", "x"]},
    ]
    (run / "run.json").write_text(json.dumps({"starts": starts}))
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        await opened.open(run / "report.html")
        assert "What made it" in await opened.run("document.body.innerText")

    visit(read)


def test_a_line_of_several_seeds_is_of_those_that_have_a_value(page: Path):
    async def read(opened: Browser) -> None:
        await opened.open(page)

        first = "{name: 'm-0', policies: {}, column: {x: [0, 10], y: [1, 2]}}"

        async def lines(column: str) -> list[str]:
            second = f"{{name: 'm-1', policies: {{}}, column: {column}}}"
            looks = "look: {colour: 'red'}, looks: ['green', 'blue', 'gold'].map((colour) => ({colour}))"
            line = f"{{runs: [{first}, {second}, {third}], policy: '', {looks}}}"
            series = f"seriesOf([{line}], (run) => run.column)"
            return await opened.run(f"{series}.map((one) => `${{one.label}}: ${{one.x}} ${{one.colour}}`)")

        third = "{name: 'm-2', policies: {}, column: null}"
        assert await lines("{x: [0, 10, 20], y: [1, 2, 3]}") == ["m-0, 2 seeds: 0,10 red"]
        assert await lines("null") == ["m-0: 0,10 red"], "a seed that has not begun is none of them"
        assert await lines("{x: [5], y: [1]}") == ["m-0: 0,10 red", "m-1: 5 blue"], "no step has both"
        assert await lines("{x: [10], y: [1]}") == ["m-0: 0,10 red", "m-1: 10 blue"], "a mean of one point"
        third = "{name: 'm-2', policies: {}, column: {x: [0, 10], y: [3, 4]}}"
        assert await lines("{x: [0], y: [1]}") == ["m-0, 2 seeds: 0,10 red", "m-1: 0 blue"], "one has just begun"
        five = "column: {x: [0, 1, 2, 3, 4], y: [1, 1, 1, 1, 1]}"
        first, third = (f"{{name: 'm-{seed}', policies: {{}}, {five}}}" for seed in (0, 2))
        assert await lines("{x: [0, 1], y: [1, 1]}") == ["m-0, 2 seeds: 0,1,2,3,4 red", "m-1: 0,1 blue"], "under half"
        assert await lines("{x: [0, 1, 2], y: [1, 1, 1]}") == ["m-0, 3 seeds: 0,1,2 red"]
        first, third = (f"{{name: 'm-{seed}', policies: {{}}, column: {{x: [0], y: [1]}}}}" for seed in (0, 2))
        assert await lines("{x: [0], y: [1]}") == ["m-0, 3 seeds: 0 red"], "all have just begun"

    visit(read)


def test_a_very_long_run_is_drawn(page: Path):
    """More values than a call of a function can have."""
    many = "Array.from({length: 300000}, (_, i) => i)"

    async def read(opened: Browser) -> None:
        await opened.open(page)
        drawn = await opened.run(f"lineChart({{title: 'T', series: [{{label: 'a', x: {many}, y: {many}}}]}}).tagName")
        assert drawn.upper() == "FIGURE"
        row = f"{{name: 'role', spans: {many}.map((i) => [i, i + 1, 'up'])}}"
        await opened.run("make = (name) => ({name, append() {}})")  # elements by the thousand are not the point
        assert await opened.run(f"timeline({{timeline: [{row}], starts: []}})[0].name") == "div"

    visit(read)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_question_about_a_run_is_answered(page: Path, width: int):
    """Did it learn, where did the time go, how many groups had no signal at step 150, what does a failed held-out
    episode look like, and why did a move get its credit."""

    async def read(opened: Browser) -> None:
        await opened.size(width, 900, dark=width < 600)
        await opened.open(page)
        text = await opened.text()
        assert "It learned: the intervals do not overlap." in text
        assert "waiting for episodes 3" in text and "forward and backward passes 5" in text
        assert "1 restart of roles" in text
        await opened.click("details:has(#step) summary")
        await opened.run(
            "(() => { const i = document.getElementById('step'); i.value = 150; i.oninput ?? 0; "
            "i.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        text = await opened.text()
        assert "At step 150" in text or "AT STEP 150" in text.upper()
        (row,) = [line for line in text.splitlines() if line.startswith("Groups without signal\t")]
        assert row.rstrip().endswith("%")
        assert await opened.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at the side"

        await opened.click("#tab-episodes")
        await opened.until("document.body.dataset.ready === 'episodes'")
        await choose(opened, "Outcome", "lost")
        await choose(opened, "From", "piece-0-0")
        await opened.click("#section-episodes tbody a")
        await opened.until("document.querySelector('.turn')")
        text = await opened.text()
        assert "lost after 8 turns, reward 0 = success 0" in text and "held out, agent@0" in text
        assert await opened.run("document.querySelectorAll('.turn').length") == 9  # eight, and the end
        await opened.click(".turn details summary")
        assert await opened.run(
            "[...document.querySelectorAll('.turn')].every(t => t.querySelector('img')?.naturalWidth > 0)"
        )
        assert "#" in await opened.text(".turn pre"), "the prompt in the words of the world"

        await opened.click("#tab-credit")
        await opened.until("document.body.dataset.ready === 'credit'")
        text = await opened.text()
        assert "of 4 episodes won" in text and "4 of 4 episodes won" not in text and " 0 of 4 episodes" not in text
        await opened.click("tr:nth-child(1) .move:nth-child(3)")
        text = await opened.text(".panel")
        assert "Advantage" in text and "for the episode and" in text and "for this move" in text
        assert "move 3" in text
        group = '{episodes: [{turns: ["a", "b", "b", "b", "a"].map((why) => ({reply: ["up"], why}))}]}'
        moves = "[[0, 1], [0, 2], [0, 3], [0, 0], [0, 4]]"
        lines = await opened.run(f"alike({group}, {moves}).map((line) => line.why + ': ' + spelled(line.turns))")
        assert lines == ["b: moves 2 to 4", "a: moves 1, 5"], "a reason that many moves share is read once"
        assert await opened.run("document.documentElement.scrollWidth <= innerWidth")

        await opened.click("#tab-runs")
        await opened.until("document.body.dataset.ready === 'runs'")
        assert "rewardflow" in await opened.text()

    visit(read)


async def choose(opened: Browser, label: str, value: str) -> None:
    """Choose a value in the list with this label."""
    await opened.run(
        "(() => { const fields = [...document.querySelectorAll('section:not([hidden]) .field')]; "
        f"const field = fields.find(f => f.firstChild.textContent === '{label}').querySelector('select'); "
        f"field.value = '{value}'; field.dispatchEvent(new Event('change')); }})()"
    )


def test_two_episodes_of_a_group_are_read_side_by_side_and_tokens_are_coloured(page: Path):
    async def read(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.open(page, "#episodes/piece-0-5/0/0/1")
        await opened.until("document.querySelector('.parting')")
        assert "part at" in await opened.text(".parting") or "They part" in await opened.text(".parting")
        assert await opened.run("document.querySelectorAll('.column').length") == 2
        for by in ("logprobs", "ratio", "advantage"):
            await choose(opened, "Colour tokens by", by)
            await opened.until("document.querySelector('.token[style]')")
        assert "advantage" in await opened.run("document.querySelector('.token').title")
        await choose(opened, "Colour tokens by", "ratio")
        await opened.until("document.querySelector('.token').title.startsWith('ratio')")
        assert (await opened.run("document.querySelector('.token').title")).startswith("ratio 0.905")  # exp(-0.1)

    visit(read)


def test_where_two_episodes_part_is_a_move_that_there_is(page: Path):
    async def read(opened: Browser) -> None:
        await opened.open(page)
        episode = "{turns: [...MOVES].map((action) => ({action, state: ''})), status: 'ok', outcome: {}}"
        said = {}
        for one, two in (("ab", "ab"), ("a", "ab"), ("ab", "ac"), ("ab", "cb"), ("abc", "abd")):
            group = f"{{episodes: [{','.join(episode.replace('MOVES', repr(moves)) for moves in (one, two))}]}}"
            said[one, two] = await opened.run(
                f"(() => {{ turnCard = () => ''; return sideBySide({{pictures: [], views: []}}, {group}, 0, 1)"
                ".querySelector('.parting').textContent; })()"
            )
        assert list(said.values()) == [
            "All their moves are the same.",
            "Their first move is the same; then one of them ends.",
            "Their first move is the same; they part at move 2.",
            "They part at their first move.",
            "Their first 2 moves are the same; they part at move 3.",
        ]

    visit(read)


def test_states_without_a_drawing_are_told_apart(page: Path):
    views = ["page: shop\nask: shoes\n\nkind: results\na\nb\nc\nd\ne", "page: shop\nask: shoes\nkind: item", ""]

    async def read(opened: Browser) -> None:
        await opened.open(page)
        lines = await opened.run(f"tellingLines({json.dumps(views)})")
        assert lines == [["kind: results", "a", "b", "c", "d"], ["page: shop", "ask: shoes", "kind: item"], []]
        assert await opened.run("[-0.001, 0, 0.2, null].map(signed)") == ["0.00", "0.00", "+0.20", "–"]
        state = "{id: 'ID', column: 0, row: 0, value: 0, visits: 1, view: 0}"
        edge = "{source: 'a', target: 'b', advantage: 0.003, actions: [{action: 'go'}], moves: [[0, 0]]}"
        graph = f"{{nodes: [{state.replace('ID', 'a')}, {state.replace('ID', 'b')}], edges: [{edge}]}}"
        drawn = f"stateGraph({{pictures: [], views: ['']}}, {{graph: {graph}}}, () => 0).element.querySelector('.edge')"
        assert await opened.run(f"{drawn}.getAttribute('class')") == "edge even", "as its label, which is 0.00"
        assert await opened.run("middle('click[b000000440]', 12)") == "click[…0440]"

    visit(read)


def test_an_address_that_leads_nowhere_says_so(page: Path):
    async def read() -> None:
        async with browser() as opened:
            await opened.size(1280, 900)
            await opened.open(page, "#episodes/piece-9-9/0/0")
            assert "This cannot be shown" in await opened.text()
            await opened.click("#section-episodes a")
            await opened.until("document.querySelector('.count')")
            await opened.open(page, "#%")  # which no browser can decode
            assert await opened.run("document.querySelector('[aria-current=page]').id") == "tab-overview"

    asyncio.run(read())


def test_a_served_page_says_when_the_run_has_gone_on(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, [run], 0, {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def read() -> None:
        async with browser() as opened:
            await opened.size(1280, 900)
            await opened.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
            await opened.until("document.body && document.body.dataset.ready")
            assert await opened.run("document.getElementById('newer') === null")
            MetricsWriter(run).write("train", step=3, policy="agent", success_rate=0.25, entropy=0.5)
            await opened.until("document.getElementById('newer')")
            await opened.click("#newer")
            await opened.until(
                "window.DATA === undefined && document.body?.dataset.ready && "
                "DATA.runs[0].policies.agent.step.length === 3"
            )
            assert opened.errors == []

    asyncio.run(read())
    server.shutdown()
    server.server_close()


def test_words_are_found_in_replies(page: Path):
    async def read(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.open(page, "#episodes")
        await opened.run("SECTIONS.episodes.filters.piece = 'piece-0-0'")
        await opened.run("SECTIONS.episodes.search('none')")
        found = int((await opened.text(".count")).split()[0])
        await opened.run("SECTIONS.episodes.search('no such word')")
        assert 0 < found < 24 and (await opened.text(".count")).startswith("0 ")
        await opened.run("SECTIONS.episodes.search('none')")
        for piece in ("piece-0-1", "piece-0-0"):  # the words are looked for anew in what is chosen
            await choose(opened, "From", piece)
            searched = (
                f"SECTIONS.episodes.found && [...SECTIONS.episodes.found].every((one) => one.startsWith('{piece}/'))"
            )
            await opened.until(searched)
        await opened.until(f"document.querySelector('.count').textContent.startsWith('{found} ')")
        overtaken = await opened.run(  # a search that reads many batches, by one that reads none
            "(async () => { const read = piece; let go; SECTIONS.episodes.filters.piece = '';"
            "piece = (key) => new Promise((done) => { go = () => done(read(key)); });"
            "const slow = SECTIONS.episodes.search('none'); await SECTIONS.episodes.search('');"
            "const newer = document.querySelector('.count')?.textContent; piece = read; go(); await slow;"
            "return [newer, document.querySelector('.count')?.textContent]; })()"
        )
        assert overtaken[0] and overtaken[0] == overtaken[1], "a search that is out of date writes nothing"

    visit(read)


def test_it_works_by_keyboard_alone(page: Path):
    async def read(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.open(page, "#credit")
        await opened.run("document.querySelector('.edge').focus()")
        await opened.press("Enter", 13)
        await opened.until("document.querySelector('.panel .why-list')")
        assert await opened.run("document.activeElement.getAttribute('aria-label').includes('advantage')")
        await opened.open(page, "#overview")
        await opened.run("document.querySelector('.chart svg').focus()")
        await opened.press("Home", 36)
        assert (await opened.text(".chart output")).startswith("Step 0:")
        unnamed = await opened.run(
            "[...document.querySelectorAll('a,button,select,input,svg[tabindex],img')].filter(e => !(e.textContent || "
            "e.getAttribute('aria-label') || e.alt || e.labels?.length)).map(e => e.outerHTML.slice(0, 80))"
        )
        assert unnamed == []

    visit(read)


def test_runs_are_shown_side_by_side_with_what_differs(tmp_path: Path):
    runs = [
        record_run(tmp_path / "a", steps=3),
        record_run(tmp_path / "b", steps=3, seed=1),
        record_run(tmp_path / "c", steps=3, changes={"optimizer.learning_rate": 0.5}),
    ]
    out = tmp_path / "all.html"
    assert main([*map(str, runs), f"--out={out}"]) == 0

    async def read(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.open(out, "#runs")
        differing = await opened.run("DATA.differences.map(d => d.field)")
        assert {"seed", "optimizer.learning_rate"} <= set(differing)
        assert "optimizer.learning_rate" in await opened.text()
        assert await opened.run("DATA.methods") == [[0, 1], [2]]
        await opened.open(out, "#overview")
        text = await opened.text()
        assert "a, agent: fewer than 5 steps, not judged yet" in text and "No rule" not in text
        assert "2 seeds" in text and await opened.run("document.querySelectorAll('.chart polygon').length > 5")
        charts = await opened.run(
            "[...document.querySelectorAll('.chart')].map(c => [c.querySelector('figcaption').firstChild.textContent, "
            "c.querySelectorAll('polygon').length, [...c.querySelectorAll('.legend li')].map(l => l.textContent), "
            "[...c.querySelectorAll('.legend .dot')].map(d => d.getAttribute('style'))])"
        )
        assert len(charts) > 5 and charts[0][0] == "Held-out success"
        assert all(labels == ["a, 2 seeds", "c"] and bands == 1 for _, bands, labels, _ in charts)
        assert len({tuple(colours) for *_, colours in charts}) == 1, "a method has one colour in all charts"

    visit(read)


def test_episodes_that_came_to_nothing_are_named_beside_the_result(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lost = [line | {"unfinished": 3} if line["kind"] == "eval" and line["step"] else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lost))
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        await opened.open(run / "report.html")
        assert "Not counted: 3 episodes at step 1 that came to nothing." in await opened.text(".verdict")

    visit(read)


def test_an_evaluation_without_rewards_says_why(tmp_path: Path):
    run = record_run(tmp_path / "run", steps=1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    why = {"unrewarded": "no reward can be given: KeyError: 'tests'"}
    failed = [line | why if line["kind"] == "eval" else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in failed))
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        await opened.open(run / "report.html")
        said = "Held out at steps 0, 1: no reward can be given: KeyError: 'tests'"
        assert (await opened.text()).count(said) == 1
        assert await opened.run("DATA.runs[0].evaluations.pop().step") == 1
        assert (await opened.run("unrewarded(DATA.runs[0])[0].textContent")).startswith("Held out at step 0: no")

    visit(read)


def test_a_run_that_breaks_no_rule_names_them_all(page: Path):
    async def read(opened: Browser) -> None:
        await opened.open(page)
        await opened.run("Object.assign(DATA.runs[0], {problems: [], unjudged: []}).name")
        said = await opened.run("problemsOf().at(-1).textContent")
        assert said.startswith("No rule of the diagnosis is broken: ")
        assert {word for rule in RULES for word in rule.split()} - {"no"} <= set(re.findall(r"\w+", said))

    visit(read)


def test_a_reward_is_taken_apart_by_the_weights_of_its_own_policy(tmp_path: Path):
    weighted = {"reward": {"components": {"success": {"weight": 0.25}}}}
    other = {"credit": {"name": "grpo", "options": {}}}
    run = record_run(tmp_path / "run", steps=1, changes={"policies.agent": weighted, "policies.other": other})
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        await opened.open(run / "report.html")
        key = await opened.run("DATA.runs[0].pieces.find((piece) => piece.kind === 'training').key")
        await opened.open(run / "report.html", f"#episodes/{key}/0/0")
        await opened.until("document.querySelector('#section-episodes .outcome')")
        assert " × 0.25" in await opened.text("#section-episodes .outcome")
        assert "with rewardflow and grpo, 1 steps" in await opened.text("#subtitle")
        await opened.open(run / "report.html", f"#credit/{key}/0")
        assert "credit by rewardflow." in await opened.text(), "the estimator of the policy that was credited"

    visit(read)


@pytest.mark.parametrize("model", ["agent", "base"])
def test_the_folder_of_an_evaluation_is_read_turn_by_turn(tmp_path: Path, model: str):
    """Of a policy, and of its base model in its place."""
    run = record_run(tmp_path / "run", steps=1)
    folder, name = run / "evaluations" / "1", f"{model}@1"
    config = ConfigDict(load_run(run).to_dict())
    config.eval.versions, config.agents = (1,), {"agent": model}
    save_run(config, folder)
    lines = [{**line, "policy": model} for line in read_lines(held_out_path(run, "agent@1"))]
    write_lines(held_out_path(folder, name), lines)
    played = [(line["task_id"], line["outcome"]["success"]) for line in lines]
    write_held_out(folder, name, [HeldOutEpisode(task, task, "", 0, "ok", won, 1, 1, {}, {}) for task, won in played])
    assert main([str(folder)]) == 0

    async def read(opened: Browser) -> None:
        await opened.open(folder / "report.html")
        text = await opened.text()
        assert "Training, step by step" not in text and "Evaluations took" not in text
        assert "rule of the diagnosis" not in text and "judged" not in text, "no rule is about an evaluation"
        assert "of 24 tasks, at step 1" in text and "keep_trajectories" not in text
        await opened.click("#tab-episodes")
        await opened.until("document.body.dataset.ready === 'episodes'")
        await opened.click("#section-episodes tbody a")
        await opened.until("document.querySelector('.turn')")
        assert f"held out, {name}" in await opened.text()
        assert len(await opened.text(".turn .tokens")) > 1, "the words of the reply"

    visit(read)


def test_a_workflow_is_seen_to_grow(tmp_path: Path):
    """Of a canvas run of 20 steps: the workflow after each edit, the reply of a node, and the reward's parts."""
    run = record_run(tmp_path / "canvas", steps=20, groups=1, played=CANVAS)
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        for width in WIDTHS.values():
            await opened.size(width, 900)
            await opened.open(run / "report.html")
            await opened.click("#tab-canvas")
            await opened.until("document.body.dataset.ready === 'canvas'")
            slider = "document.querySelector('#section-canvas input[type=range]')"
            boxes = []
            for edit in range(1, int(await opened.run(f"{slider}.max")) + 1):
                await opened.run(f"({slider}.value = {edit}, {slider}.dispatchEvent(new Event('input')))")
                boxes.append(await opened.run("document.querySelectorAll('.node-run').length"))
            assert boxes == sorted(boxes) and boxes[0] < boxes[-1], "it grew"
            assert await opened.run("document.querySelector('#section-canvas img').naturalWidth > 0")
            await opened.click(".node-run summary")
            text = await opened.text()
            assert "It was given" in text and "It gave" in text and "problem: " in text and " tokens, cost " in text
            assert "Reward of the workflow: base -1 + structure S" in text
            assert "Unique workflows" in text and "Use of operators" in text
            assert await opened.run("document.documentElement.scrollWidth <= innerWidth")

    visit(read)


def test_the_canvas_page_is_about_the_run_that_is_chosen(tmp_path: Path):
    runs = [
        record_run(tmp_path / name, steps=1, groups=1, size=2, seed=seed, played=CANVAS)
        for seed, name in enumerate("ab")
    ]
    out = tmp_path / "both.html"
    assert main([*map(str, runs), f"--out={out}"]) == 0

    async def read(opened: Browser) -> None:
        for number, name in enumerate("ab"):
            await opened.open(out)
            key = await opened.run(f"DATA.runs[{number}].pieces.at(-1).key")
            await opened.open(out, f"#canvas/{key}")
            assert f"Over training of {name}" in await opened.text()

    visit(read)


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path: Path):
    """A reply may say anything: no script of it runs, and no tag of it is one."""
    run = record_run(tmp_path / "run", steps=1)
    metrics = (run / "metrics.jsonl").read_text().replace("process down", "</script><img src=x onerror=window.hurt=1>")
    (run / "metrics.jsonl").write_text(metrics)
    assert main([str(run)]) == 0

    async def read(opened: Browser) -> None:
        await opened.size(1280, 900)
        await opened.open(run / "report.html")
        assert "onerror=window.hurt" in await opened.text()
        assert await opened.run("window.hurt === undefined")

    visit(read)
