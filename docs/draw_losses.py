"""Draw docs/images/clip_regions.svg from the losses themselves: python docs/draw_losses.py

Each panel shows, over the ratio r = pi / mu, how strongly a token pulls on log pi: the derivative of minus the loss,
divided by its advantage. Where it is zero the clip rule has cut the token off (shaded).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flowjax.losses.policy import LossOptions, policy_loss

PANELS = {
    "ppo, 0.2 / 0.28": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28},
    "ppo, dual clip 2": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0},
    "sapo, 1 / 1.05": {"kind": "sapo"},
    "cispo, 0.2 / 0.28": {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.28},
    "rollout_is, 0.2 / 0.28": {"kind": "rollout_is", "clip_low": 0.2, "clip_high": 0.28},
    "dppo, 0.2, mu = 0.3": {"kind": "dppo", "clip_low": 0.2, "clip_high": 0.2, "pull": 0.0},
}
LARGEST_RATIO, SAMPLER_PROBABILITY, POINTS = 3.0, 0.3, 301
WIDTH, HEIGHT, GAP, LEFT, TOP = 150, 92, 26, 64, 34
LINE, CUT, AXIS, TEXT = "#2563a8", "#f3d9cc", "#9aa3ad", "#33404d"


def pull(options: dict, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Ratios, and the derivative of minus the loss with respect to log pi over the advantage."""
    ratios = jnp.linspace(0.01, LARGEST_RATIO, POINTS)
    behaviour = jnp.full(POINTS, jnp.log(SAMPLER_PROBABILITY))
    everything = jnp.ones(POINTS, bool)

    chosen = LossOptions(**{name: value for name, value in options.items() if name != "kind"})

    def total(logprobs):
        advantages = jnp.full(POINTS, advantage)
        return policy_loss(logprobs, behaviour, advantages, everything, kind=options["kind"], options=chosen)[0]

    return np.asarray(ratios), np.asarray(-jax.grad(total)(behaviour + jnp.log(ratios)) / advantage)


def panel(x: float, y: float, options: dict, advantage: float) -> list[str]:
    ratios, weights = pull(options, advantage)

    def across(ratio):
        return x + ratio / LARGEST_RATIO * WIDTH

    def down(weight):
        return y + HEIGHT - min(weight, LARGEST_RATIO) / LARGEST_RATIO * HEIGHT

    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="white" stroke="{AXIS}" stroke-width="0.6"/>'
    ]
    edges = np.flatnonzero(np.diff((np.abs(weights) < 1e-6).astype(int), prepend=0, append=0))
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        start, end = across(ratios[first]), across(ratios[last - 1])
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="{HEIGHT}" fill="{CUT}"/>')
    at = across(1.0)
    parts.append(f'<path d="M{at:.1f} {y} V{y + HEIGHT}" stroke="{AXIS}" stroke-width="0.6" stroke-dasharray="2 2"/>')
    points = " ".join(f"{across(r):.1f},{down(w):.1f}" for r, w in zip(ratios, weights, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="1.6"/>')
    return parts


def drawing() -> str:
    """The whole picture as SVG."""
    width = LEFT + len(PANELS) * (WIDTH + GAP)
    height = TOP + 2 * (HEIGHT + GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{TEXT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, (advantage, label) in enumerate(((1.0, "A &gt; 0"), (-1.0, "A &lt; 0"))):
        y = TOP + row * (HEIGHT + GAP)
        parts.append(f'<text x="14" y="{y + HEIGHT / 2}">{label}</text>')
        for value in (0, 1, 2, 3):
            at = y + HEIGHT - value / LARGEST_RATIO * HEIGHT + 3
            parts.append(f'<text x="{LEFT - 5}" y="{at:.1f}" font-size="8" text-anchor="end">{value}</text>')
        for column, (title, options) in enumerate(PANELS.items()):
            x = LEFT + column * (WIDTH + GAP)
            parts += panel(x, y, options, advantage)
            if row == 0:
                parts.append(f'<text x="{x + WIDTH / 2}" y="{TOP - 12}" text-anchor="middle">{title}</text>')
            for value in (0, 1, 2, 3):
                at = x + value / LARGEST_RATIO * WIDTH
                parts.append(
                    f'<text x="{at:.1f}" y="{y + HEIGHT + 11}" font-size="8" text-anchor="middle">{value}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("images").joinpath("clip_regions.svg").write_text(drawing(), encoding="utf-8")
