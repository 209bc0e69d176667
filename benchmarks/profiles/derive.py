"""Derives the profiles in this folder from the measured numbers in `measured.json`; README.md explains each step.

python benchmarks/profiles/derive.py        writes llama2-7b.json, llama2-13b.json and llama2-34b.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from elaunch.policy.profile import LayerProfile, Profile

HERE = Path(__file__).resolve().parent
VOCABULARY = 32000
SEQUENCE = 4096  # tokens of a row
TENSOR_PARALLEL = 4
HEAD_WIDTH = 128
BACKWARD = 2  # times the forward's operations
ACTIVATION_BYTES = 2  # bfloat16
PARAMETER_BYTES = 2  # bfloat16
OPTIMIZER_BYTES = 12  # float32: masters, and AdamW's two moments
LOGIT_BYTES = 2 + 4  # in bfloat16, and in float32 for the loss
ALL_REDUCES = 2  # of a layer in each direction: after attention, after the perceptron
LATENCY_S = 20e-6


@dataclass(frozen=True)
class Model:
    """The sizes that decide what a layer costs."""

    name: str
    n_layers: int
    hidden: int
    intermediate: int
    key_value_heads: int

    @property
    def matrix_parameters(self) -> int:
        """Of one layer: query and output, key and value, and the three matrices of the perceptron."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * HEAD_WIDTH * self.key_value_heads
        return attention + 3 * self.hidden * self.intermediate

    def forward_flops(self, tokens: int) -> int:
        """Of one layer on one sample; attention is causal, so half of the products of queries and keys."""
        return 2 * self.matrix_parameters * tokens + 2 * tokens * tokens * self.hidden


MODELS = (
    Model("llama2-7b", n_layers=32, hidden=4096, intermediate=11008, key_value_heads=32),
    Model("llama2-13b", n_layers=40, hidden=5120, intermediate=13824, key_value_heads=40),
    Model("llama2-34b", n_layers=48, hidden=8192, intermediate=22016, key_value_heads=8),
)

MEASURED = Model("measured", n_layers=1, hidden=4096, intermediate=11008, key_value_heads=32)
MEASURED_TOKENS = 2048


def measured() -> dict[str, Any]:
    """The raw numbers: milliseconds, MiB, 1e9 bytes per second."""
    found: dict[str, Any] = json.loads((HERE / "measured.json").read_text())
    return found


def flops_per_s(raw: Mapping[str, Any]) -> float:
    """What one device achieved on the measured layer."""
    milliseconds = raw["computation_profiling_bf16_hidden4096_head32_seqlen2048"]["layertype_0"]
    return MEASURED.forward_flops(MEASURED_TOKENS) / (1e-3 * float(milliseconds))


def derive(model: Model, raw: Mapping[str, Any], tokens: int = SEQUENCE, devices: int = TENSOR_PARALLEL) -> Profile:
    """The profile of `model` on TP groups of so many devices, for rows of so many tokens."""
    devices_flops_per_s = devices * flops_per_s(raw)
    hidden_bytes = tokens * model.hidden * ACTIVATION_BYTES

    def layer(
        flops: int,
        all_reduce_s: float,
        parameters: int,
        kept_bytes: float,
        output_bytes: int,
        apart: tuple[int, int],
    ) -> LayerProfile:
        weights, weight_bytes = apart
        compute_s = flops / devices_flops_per_s
        backward_s = BACKWARD * compute_s + all_reduce_s
        # The gradients of matrices take as many operations as their products in the forward; attention has none.
        weights_s = 2 * weights * tokens / devices_flops_per_s
        return LayerProfile(
            forward_s_per_row=round(compute_s + all_reduce_s, 9),
            backward_s_per_row=round(backward_s, 9),
            weight_share=round(weights_s / backward_s, 4) if backward_s else 0.5,
            parameter_bytes=PARAMETER_BYTES * parameters,
            optimizer_bytes=OPTIMIZER_BYTES * parameters,
            activation_bytes_per_row=round(kept_bytes),
            output_bytes_per_row=output_bytes,
            weight_bytes_per_row=weight_bytes,
        )

    reduced_s = ALL_REDUCES * _all_reduce_s(raw, hidden_bytes, devices)
    # Outputs of the matrices that are cut over the devices, once; those of the others and the norms, on each of them.
    cut = 2 * model.intermediate + model.hidden + 2 * HEAD_WIDTH * model.key_value_heads
    gradient_bytes = tokens * ACTIVATION_BYTES * (cut + devices * 4 * model.hidden)
    block = layer(
        model.forward_flops(tokens),
        reduced_s,
        model.matrix_parameters + 2 * model.hidden,
        devices * _kept_bytes(model, raw, tokens, devices),
        hidden_bytes,
        (model.matrix_parameters, gradient_bytes),
    )
    table = VOCABULARY * model.hidden
    embedding = layer(0, 0.0, table, devices * hidden_bytes, hidden_bytes, (0, 0))
    logits = tokens * VOCABULARY
    head = layer(
        2 * table * tokens,
        0.0,
        table + model.hidden,
        devices * hidden_bytes + LOGIT_BYTES * logits,
        ACTIVATION_BYTES * logits,
        (table, ACTIVATION_BYTES * logits + devices * hidden_bytes),
    )
    return Profile(
        model.name,
        (embedding, *[block] * model.n_layers, head),
        devices,
        1e9 * raw["p2p_bandwidth_2nodes_8gpus_per_node"]["pp_size_8"],
        LATENCY_S,
        (
            "derived, not measured: see README.md beside this file",
            f"a row is a sample of {tokens} tokens; a worker stands for {devices} devices",
            "raw numbers: PKU-DAIR/Hetu, tools/Galvatron (Apache-2.0)",
        ),
    )


def _all_reduce_s(raw: Mapping[str, Any], tensor_bytes: int, devices: int) -> float:
    """Of a tensor over one TP group; the measured bandwidth is the bus bandwidth of a ring."""
    bandwidth_bytes_per_s = 1e9 * raw["allreduce_bandwidth_1nodes_8gpus_per_node"]["allreduce_size_4_consec_1"]
    passes = 2 * (devices - 1) / devices
    return float(passes * tensor_bytes / bandwidth_bytes_per_s)


def _kept_bytes(model: Model, raw: Mapping[str, Any], tokens: int, devices: int) -> float:
    """Activations of a layer on one device of a TP group: the measured ones, by tokens and hidden size."""
    by_degree = raw["memory_profiling_bf16_hidden4096_head32_seqlen2048"]["layertype_0"]["tp_activation_per_bsz_dict"]
    growth = tokens * model.hidden / (MEASURED_TOKENS * MEASURED.hidden)
    return float(by_degree[str(devices)] * 2**20 * growth)


def main() -> None:
    raw = measured()
    for model in MODELS:
        (HERE / f"{model.name}.json").write_text(derive(model, raw).to_json())


if __name__ == "__main__":
    main()
