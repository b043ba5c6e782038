"""The kernels that CUDA takes where composite operators choose by device, and what they save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from medckpt.memory.choices import attention_backend
from tests.memory.test_autocast import BF16, DTYPES, FP16, FP32, PRECISIONS, cuda_build, leaf, saved, tracing

aten = torch.ops.aten


@pytest.mark.parametrize("precision", PRECISIONS)
def test_choices_by_device(precision: str) -> None:
    with tracing(precision):
        x = leaf(2, 4, 6, dtype=DTYPES.get(precision, FP32))
        assert saved(lambda: F.dropout(x, 0.1))[1] == [((2, 4, 6), torch.bool)]
        weight, bias = torch.ones(4), torch.zeros(4)
        _, kept, _ = saved(lambda: F.batch_norm(x, None, None, weight, bias, training=True))
        assert kept[:1] == [((2, 4, 6), x.dtype)]
        assert kept.count(((4,), FP32)) == 3  # weight, mean, inverse deviation
        # cuDNN has no bfloat16; its reserve is the fifth, of no size.
        assert (len(kept) == 5) is (precision != "bf16-mixed")


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "flash"),
        ({"dtype": FP32}, "efficient"),
        ({"dtype": torch.float64}, "math"),
        ({"mask": True}, "efficient"),
        ({"size": 36}, "flash"),  # padded
        ({"size": 36, "mask": True}, "math"),
        ({"size": 36, "dtype": FP32}, "efficient"),
        ({"size": 30, "dtype": FP32}, "math"),
        ({"size": 264}, "efficient"),
        ({"size": 256, "capability": (8, 6), "dropout": 0.1}, "efficient"),
        ({"size": 256, "capability": (8, 6)}, "flash"),
        ({"capability": (9, 0)}, "cudnn"),
        ({"capability": (9, 0), "dropout": 0.1}, "flash"),
        ({"capability": (7, 0)}, "math"),
        ({"capability": (7, 0), "dtype": FP16}, "efficient"),
        ({"causal": True, "tokens": 5}, "efficient"),
        ({"heads": 2}, "math"),
        ({"heads": 2, "grouped": True}, "flash"),
    ],
)
def test_attention_backend(changes: dict[str, Any], backend: str) -> None:
    wanted = {"dtype": BF16, "size": 64, "mask": None, "tokens": 9, "heads": 4, **changes}
    dtype, size, mask, tokens, heads = (wanted.pop(key) for key in ("dtype", "size", "mask", "tokens", "heads"))
    with FakeTensorMode():
        query, key = leaf(2, 4, 9, size, dtype=dtype), leaf(2, heads, tokens, size, dtype=dtype)
        assert attention_backend(query, key, key, torch.empty(9, tokens) if mask else None, **wanted) == backend


@pytest.mark.parametrize(("precision", "capability"), [("32", (8, 0)), ("bf16-mixed", (8, 0)), ("16-mixed", (9, 0))])
def test_attention_saves_its_operands_and_a_logsumexp(precision: str, capability: tuple[int, int]) -> None:
    dtype = DTYPES.get(precision, FP32)
    with tracing(precision, capability=capability):
        query, key, value = (leaf(2, 4, 16, 64, dtype=dtype) for _ in range(3))
        out, kept, size = saved(lambda: F.scaled_dot_product_attention(query, key, value))
        assert out.dtype == dtype
        assert kept.count(((2, 4, 16, 64), dtype)) == 4
        logsumexp = 4 * 2 * 4 * (32 if precision == "32" else 16)  # the efficient kernel pads to 32 tokens
        assert size - 4 * out.numel() * out.element_size() - logsumexp in (16, 24)  # seed and offset of its dropout
        # Padded sizes and masks; the padding is what is kept.
        query = leaf(2, 4, 9, 36, dtype=dtype)
        mask = torch.ones(9, 9, dtype=torch.bool)
        assert F.scaled_dot_product_attention(query, query, query).shape == query.shape
        assert F.scaled_dot_product_attention(query, query, query, attn_mask=mask).shape == query.shape


@cuda_build
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fused_attention_saves_what_it_saves_on_cuda(dtype: torch.dtype) -> None:
    answers = []
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            q = leaf(2, 4, 16, 64, dtype=dtype, device=device)
            calls = (
                lambda q=q: aten._scaled_dot_product_flash_attention(q, q, q),
                lambda q=q: aten._scaled_dot_product_efficient_attention(q, q, q, None, True),
                lambda q=q: aten._scaled_dot_product_cudnn_attention(q, q, q, None, True),
            )
            answers.append([saved(call)[1:] for call in calls])
    assert answers[0] == answers[1]
