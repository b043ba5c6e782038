"""Other planners on the nets of policies.py: what each chooses, laid on a network; or its own words why it cannot.

* torch.compile with `torch._functorch.config.activation_memory_budget`: a share of what the partitioner would save.
* torch.distributed._tools.sac_ilp (needs pulp): a programme over modules, from torch's own estimators.
* ckptplan (PyPI): blocks of a chain, measured one by one, chosen by dynamic programming.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

BUDGETS = (0.5, 0.1)
"""Shares of the activations that a plain step saves."""
Found = dict[str, tuple[Any, Callable[[], Any]]]


def add_peers(case: dict[str, Any], entry: Callable[..., Any], found: Found, notes: dict[str, str]) -> None:
    """Adds label -> (network, step) of every peer that runs, and why to `notes` for those that do not.

    Args:
        case: model, input, target, loss, precision (see policies.py).
        entry: makes (network, step) of case and network, and of a step of (input, target) if it is not the plain one.
        found, notes: are added to.
    """
    for share in BUDGETS:
        _try(f"torch.compile, budget {share}", lambda share=share: _compiled(case, entry, share), found, notes)
        _try(f"sac_ilp, budget {share}", lambda share=share: _sac_ilp(case, share), found, notes)
        _try(f"ckptplan, budget {share}", lambda share=share: _ckptplan(case, entry, share), found, notes)


def _try(label: str, make: Callable[[], Any], found: Found, notes: dict[str, str]) -> None:
    try:
        found[label] = make()
    except (Exception, SystemExit) as error:  # whatever it is, the table says it
        words = str(error).strip().splitlines() or [""]
        notes[label] = f"does not run: {type(error).__name__}: {words[0][:200]}"


def _compiled(case: dict[str, Any], entry: Callable[..., Any], share: float) -> Any:
    import torch

    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = share
    net = copy.deepcopy(case["model"])
    run = torch.compile(net)
    made = entry(case, net, lambda image, target: case["loss"](run(image), target))
    made[1]()  # compiles now, under this budget
    return made


def _sac_ilp(case: dict[str, Any], share: float) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import ilp_utils, mem_tracker, runtime_estimator, sac_estimator, sac_ilp

    from medckpt.memory.measure import fake_copy

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net = fake_copy(case["model"], mode)
        image, target = torch.empty_like(case["input"]), torch.empty_like(case["target"])

        def step() -> None:
            case["loss"](net(image), target).backward()
            net.zero_grad(set_to_none=True)

        memory, runtime = mem_tracker.MemTracker(), runtime_estimator.RuntimeEstimator()
        memory.track_external(net)
        with memory:
            step()
        with runtime(estimate_mode_type="operator-level-cost-model"):
            step()
        sac = sac_estimator.SACEstimator()
        with sac(estimate_mode_type="operator-level-cost-model"):
            case["loss"](net(image), target)
        stats = ilp_utils.aggregate_stats(net, memory, runtime, sac, torch.device("cpu"))
    peak = max(stat["act_total"] for stat in stats["mod_stats"]) / 2**30
    decisions, _, _ = sac_ilp.sac_milp(ilp_utils.parse_module_info(stats), memory_budget=share * peak)
    raise RuntimeError(f"it answers shares per module and has no part that applies them: {decisions}")


def _ckptplan(case: dict[str, Any], entry: Callable[..., Any], share: float) -> Any:
    import ckptplan
    import torch

    net = copy.deepcopy(case["model"])
    chain = getattr(net, "blocks", None)
    if chain is None:
        raise RuntimeError("it plans a chain of blocks, each fed by the one before; this network has inputs beside")
    given: list[torch.Tensor] = []
    watch = chain[0].register_forward_pre_hook(lambda _, args: given.append(args[0].detach().requires_grad_()))
    with torch.no_grad():
        net(case["input"])
    watch.remove()
    inputs = (given[0],)
    blocks = ckptplan.declare_blocks(net, [(f"block{index}", block) for index, block in enumerate(chain)])
    profiles = ckptplan.profile_blocks(blocks, inputs, device="cpu", dtype=torch.float32)
    saved = sum(profile.activation_bytes_estimate or 0 for profile in profiles)
    plan = ckptplan.plan_checkpoints(
        profiles, blocks, target_kind="activation_budget_bytes", target_value=int(share * saved)
    )
    net.blocks = torch.nn.ModuleList([ckptplan.apply_plan(blocks, plan, inputs)])
    return entry(case, net)
