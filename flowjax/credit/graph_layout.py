"""A plain layout for small directed graphs, as SVG: layers by distance from the start, straight arrows."""

from collections import deque
from collections.abc import Mapping, Sequence

Box = tuple[str, str, str, float, bool]  # text, fill, stroke, stroke width, whether it is a start
Arrow = tuple[str, str, str, str, float]  # source, target, text, colour, width

BOX_WIDTH, LINE_HEIGHT, MARGIN = 96, 13, 34
LAYER_GAP, ROW_GAP = 96, 34


def layered_svg(boxes: Mapping[str, Box], arrows: Sequence[Arrow]) -> str:
    """One SVG element with a box for each node and an arrow for each edge."""
    height = max((box[0].count("\n") + 1 for box in boxes.values()), default=1) * LINE_HEIGHT + 12
    at = _positions(boxes, arrows, height)
    width = max((x for x, _ in at.values()), default=0) + BOX_WIDTH + MARGIN
    depth = max((y for _, y in at.values()), default=0) + height + MARGIN
    colours = sorted({arrow[3] for arrow in arrows})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{depth:.0f}" '
        f'viewBox="0 0 {width:.0f} {depth:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="10">',
        "<defs>",
        *(_arrow_head(colour) for colour in colours),
        "</defs>",
        *(_arrow(arrow, at, height) for arrow in arrows),
        *(_box(box, *at[name], height) for name, box in boxes.items()),
        "</svg>",
    ]
    return "\n".join(parts)


def _positions(
    boxes: Mapping[str, Box], arrows: Sequence[Arrow], height: float
) -> dict[str, tuple[float, float]]:  # fmt: skip
    onward: dict[str, list[str]] = {name: [] for name in boxes}
    for source, target, *_ in arrows:
        onward[source].append(target)
    layer = {name: 0 for name, box in boxes.items() if box[4]} or dict.fromkeys(list(boxes)[:1], 0)
    queue = deque(layer)
    while queue:
        name = queue.popleft()
        for target in onward[name]:
            if target not in layer:
                layer[target] = layer[name] + 1
                queue.append(target)
    rows: dict[int, int] = {}
    at = {}
    for name in boxes:
        column = layer.get(name, 0)
        row = rows.get(column, 0)
        rows[column] = row + 1
        at[name] = (MARGIN + column * (BOX_WIDTH + LAYER_GAP), MARGIN + row * (height + ROW_GAP))
    return at


def _arrow_head(colour: str) -> str:
    return (
        f'<marker id="head-{colour.lstrip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
    )


def _box(box: Box, x: float, y: float, height: float) -> str:
    text, fill, stroke, width, _ = box
    lines = text.split("\n")
    top = y + (height - len(lines) * LINE_HEIGHT) / 2 + LINE_HEIGHT - 3
    spans = "".join(
        f'<tspan x="{x + BOX_WIDTH / 2:.0f}" y="{top + i * LINE_HEIGHT:.0f}">{line}</tspan>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{width}"/><text text-anchor="middle" xml:space="preserve">{spans}</text>'
    )


def _arrow(arrow: Arrow, at: Mapping[str, tuple[float, float]], height: float) -> str:
    source, target, text, colour, width = arrow
    (x0, y0), (x1, y1) = at[source], at[target]
    if source == target:
        start, end = (x0 + BOX_WIDTH * 0.35, y0), (x0 + BOX_WIDTH * 0.65, y0)
        path = (
            f"M{start[0]:.0f} {start[1]:.0f} C{x0:.0f} {y0 - 26:.0f} "
            f"{x0 + BOX_WIDTH:.0f} {y0 - 26:.0f} {end[0]:.0f} {end[1]:.0f}"
        )
        label = (x0 + BOX_WIDTH / 2, y0 - 22)
    else:
        forward = x1 > x0
        start = (x0 + BOX_WIDTH, y0 + height * 0.4) if forward else (x0, y0 + height * 0.7)
        end = (x1, y1 + height * 0.4) if forward else (x1 + BOX_WIDTH, y1 + height * 0.7)
        if x1 == x0:
            start, end = (x0 + BOX_WIDTH, y0 + height / 2), (x1 + BOX_WIDTH, y1 + height / 2)
        bend = 40 if forward or x1 == x0 else -40
        turn = bend if x1 == x0 else -bend
        path = (
            f"M{start[0]:.0f} {start[1]:.0f} C{start[0] + bend:.0f} {start[1]:.0f} "
            f"{end[0] + turn:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"
        )
        label = ((start[0] + end[0]) / 2 + (bend / 2 if x1 == x0 else 0), (start[1] + end[1]) / 2 - 4)
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:.2f}" '
        f'marker-end="url(#head-{colour.lstrip("#")})"/>'
        f'<text x="{label[0]:.0f}" y="{label[1]:.0f}" text-anchor="middle" font-size="9" fill="{colour}">{text}</text>'
    )
