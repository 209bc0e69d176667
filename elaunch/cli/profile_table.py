"""What `elaunch ctl profile` prints of a profile."""

from __future__ import annotations

from itertools import groupby

from elaunch.policy.profile import LinkProfile, Profile


def table(profile: Profile) -> str:
    """Returns text for people: a line for each run of equal layers, then the particulars of workers and links."""
    rows = [("layers", "forward", "backward", "update", "parameters", "optimizer", "activation", "output", "")]
    first = 0
    for layer, equal in groupby(profile.layers):
        stop = first + len(list(equal))
        moving = any(f"layers[{index}]" in profile.unstable for index in range(first, stop))
        rows.append(
            (
                f"{first}:{stop}",
                _seconds_text(layer.fixed_forward_s, layer.forward_s_per_row),
                _seconds_text(layer.fixed_backward_s, layer.backward_s_per_row),
                _milliseconds(layer.update_s),
                f"{layer.parameter_bytes:,}",
                f"{layer.optimizer_bytes:,}",
                f"{layer.activation_bytes_per_row:,} a row",
                f"{layer.output_bytes_per_row:,} a row",
                "not stable yet" if moving else "",
            )
        )
        first = stop
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    moving_step = ", not stable yet" if "step_s" in profile.unstable else ""
    lines += [
        f"a step: {_milliseconds(profile.step_s)} besides{moving_step}; a change: {_milliseconds(profile.change_s)} "
        "besides",
        f"an action: {_milliseconds(profile.action_s)} besides; samples: {_milliseconds(profile.load_s_per_row)} a row",
        f"a message between stages: {_milliseconds(profile.send_s)} to send, {_milliseconds(profile.hop_s)} until who "
        "waits for it goes on",
        f"links: {LinkProfile(profile.bandwidth_bytes_per_s, profile.latency_s)}; {len(profile.links)} measured",
    ]
    for slot, worker in profile.workers.items():
        memory = "" if worker.memory_bytes is None else f", {worker.memory_bytes:,} bytes"
        lines.append(f"worker {slot}: speed {worker.speed:g}{memory}")
    lines += [f"link {source} to {target}: {link}" for (source, target), link in profile.links.items()]
    lines += [f"contradiction: {text}" for text in profile.contradictions]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _seconds_text(fixed_s: float, per_row_s: float) -> str:
    fixed = f"{_milliseconds(fixed_s)} + " if fixed_s else ""
    return f"{fixed}{_milliseconds(per_row_s)} a row"
