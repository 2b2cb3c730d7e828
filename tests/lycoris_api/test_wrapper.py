"""The wrapper: create, apply, save, load, stack, restore, merge, and the manners of a network."""

from __future__ import annotations

import copy

import lycoris
import pytest
import torch
from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from .support import randomise, toy_input, toy_model
from .target import ON_PEER, differs, refused, relative_error

ALGOS = {
    "lora": {"linear_dim": 3, "linear_alpha": 2.0},
    "loha": {"linear_dim": 3, "linear_alpha": 2.0},
    "lokr": {"linear_dim": 2, "linear_alpha": 3.0},
    "glora": {"linear_dim": 3, "linear_alpha": 2.0},
    "diag-oft": {"linear_dim": 3, "linear_alpha": 2.0},
    "tlora": {"linear_dim": 3, "linear_alpha": 2.0, "preset": "full-lin"},
    "dylora": {"linear_dim": 6, "linear_alpha": 2.0, "block_size": 2},
    "ia3": {"linear_dim": 3, "linear_alpha": 2.0},
    "full": {"linear_dim": 3, "linear_alpha": 2.0},
}
PLAIN = ("lora", "loha", "lokr", "glora", "diag-oft")
NAMES = {
    "lycoris_conv_in", "lycoris_head", "lycoris_blocks_0_to_q", "lycoris_blocks_0_to_out", "lycoris_blocks_1_to_q",
    "lycoris_blocks_1_to_out",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _default_targets():
    """lycoris-lora keeps the last preset for the process (rule 43); put the class's own targets back."""
    LycorisNetwork.apply_preset(
        {
            "enable_conv": True,
            "target_module": ["Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm"],
            "target_name": [],
            "exclude_name": [],
            "module_algo_map": {},
            "name_algo_map": {},
            "lora_prefix": "lycoris",
            "use_fnmatch": False,
        }
    )


def network(model: nn.Module, algo: str = "lora", strength: float = 1.0, seed: int = 3, **options) -> LycorisNetwork:
    """A network with random, non-zero parameters (not applied yet)."""
    settings = {key: value for key, value in ALGOS[algo].items() if not (ON_PEER and key == "preset")} | options
    torch.manual_seed(seed)
    net = create_lycoris(model, strength, algo=algo, **settings)
    for index, adapter in enumerate(net.loras):
        if not (algo == "tlora" and adapter.org_module[0].weight.dim() > 2):
            randomise(adapter, seed + index)
    return net.eval()


def linear_only(algo: str) -> dict:
    return {"preset": LINEAR_PRESET} if algo == "tlora" else {}


@pytest.fixture(scope="module", autouse=True)
def _linear_preset(tmp_path_factory):
    global LINEAR_PRESET
    path = tmp_path_factory.mktemp("preset") / "linear.toml"
    path.write_text('enable_conv = false\ntarget_module = ["Linear"]\n')
    LINEAR_PRESET = str(path)


LINEAR_PRESET = ""


@pytest.mark.parametrize("algo", list(ALGOS))
def test_create_and_apply(algo):
    model, x = toy_model(), toy_input()
    base = model(x)
    net = network(model, algo, **linear_only(algo))
    assert isinstance(net, LycorisNetwork)
    names = [adapter.lora_name for adapter in net.loras]
    assert set(names) == (NAMES - {"lycoris_conv_in"} if algo == "tlora" else NAMES)
    assert torch.equal(model(x), base)
    net.apply_to()
    assert relative_error(model(x), base) > 1e-3
    assert {name for name, _ in net.named_children()} >= set(names)
    assert {key.split(".")[0] for key in net.state_dict()} == set(names)
    assert list(net.parameters())
    net.restore()
    assert torch.equal(model(x), base)


def test_preset_of_the_process():
    """A preset belongs to the network it was given to (rule 43)."""
    create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, preset=LINEAR_PRESET)
    later = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0)
    names = {adapter.lora_name for adapter in later.loras}

    def peer() -> None:
        assert names == NAMES - {"lycoris_conv_in"}

    def ours() -> None:
        assert names == NAMES

    differs(43, peer=peer, ours=ours)


def test_parameters_are_there_at_creation():
    net = network(toy_model())

    def peer() -> None:
        assert not list(net.parameters())

    def ours() -> None:
        assert len(list(net.parameters())) == 2 * len(NAMES)
        assert {key.split(".")[0] for key in net.state_dict()} == NAMES

    differs(43, peer=peer, ours=ours)


def test_applying_twice_is_harmless():
    model, x = toy_model(), toy_input()
    net = network(model)
    net.apply_to()
    once = model(x)
    net.apply_to()

    def peer() -> None:
        with pytest.raises(RecursionError):
            model(x)

    def ours() -> None:
        assert torch.equal(model(x), once)
        net.restore()

    differs(43, peer=peer, ours=ours)


@pytest.mark.parametrize("algo", PLAIN)
def test_set_multiplier(algo):
    model, x = toy_model(), toy_input()
    base = model(x)
    net = network(model, algo)
    net.apply_to()
    seen = {}
    for strength in (1.0, 0.3, -1.0, 2.0, 0.0, 1.0):
        net.set_multiplier(strength)
        assert all(adapter.multiplier == strength for adapter in net.loras)
        output = model(x)
        if strength in seen:
            torch.testing.assert_close(output, seen[strength])
        seen[strength] = output
    torch.testing.assert_close(seen[0.0], base, atol=1e-6, rtol=1e-6)
    distinct = [seen[m] for m in (1.0, 0.3, -1.0, 2.0)]
    assert all(relative_error(a, b) > 1e-3 for i, a in enumerate(distinct) for b in distinct[:i])


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr"])
def test_strength_zero_is_the_base_bit_for_bit(algo):
    model, x = toy_model(), toy_input()
    base = model(x)
    net = network(model, algo, strength=0.0)
    net.apply_to()
    assert torch.equal(model(x), base)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("algo", PLAIN)
def test_save_then_load_into_a_new_network(algo, suffix, tmp_path):
    model, x = toy_model(), toy_input()
    net = network(model, algo)
    net.apply_to()
    trained = model(x)
    path = str(tmp_path / f"adapter{suffix}")
    net.save_weights(path, torch.float32, {})
    net.restore()
    other = network(model, algo, seed=40)
    other.apply_to()
    assert relative_error(model(x), trained) > 1e-3
    other.load_weights(path)
    torch.testing.assert_close(model(x), trained, atol=1e-5, rtol=1e-5)
    other.restore()


@pytest.mark.parametrize("algo", list(ALGOS))
def test_load_before_apply(algo, tmp_path):
    """A file read before apply_to acts after it (rule 40)."""
    model, x = toy_model(), toy_input()
    net = network(model, algo, **linear_only(algo))
    net.apply_to()
    path = str(tmp_path / "adapter.safetensors")
    trained = model(x)
    net.save_weights(path, torch.float32, {})
    net.restore()
    other = network(model, algo, seed=40, **linear_only(algo))
    broken_on_peer = algo in ("dylora", "full")

    def check() -> None:
        other.load_weights(path)
        other.apply_to()
        torch.testing.assert_close(model(x), trained, atol=2e-5, rtol=2e-5)

    if ON_PEER and broken_on_peer:
        return
    check()


def test_load_report(tmp_path):
    net = network(toy_model())
    net.apply_to()
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, None, None)
    tensors = load_file(path)
    del tensors["lycoris_head.lora_up.weight"]
    tensors["lycoris_tail.lora_up.weight"] = torch.zeros(3, 3)
    from safetensors.torch import save_file

    save_file(tensors, path)
    report = net.load_weights(path)
    assert any("lycoris_head.lora_up.weight" in str(value) for value in report.values())
    assert any("lycoris_tail.lora_up.weight" in str(value) for value in report.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saved_dtype_and_metadata(dtype, tmp_path):
    net = network(toy_model())
    net.apply_to()
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, dtype, {"author": "me"})
    tensors = load_file(path)
    assert {value.dtype for value in tensors.values()} == {dtype}
    assert {key.split(".")[0] for key in tensors} == NAMES
    with safe_open(path, "pt") as file:
        assert file.metadata()["author"] == "me"


def test_saved_without_dtype_keeps_the_stored_one(tmp_path):
    net = network(toy_model())
    net.apply_to()
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, None, None)
    assert {value.dtype for value in load_file(path).values()} == {torch.float32}


@pytest.mark.parametrize("algo", list(ALGOS))
def test_create_from_weights(algo, tmp_path):
    model, x = toy_model(), toy_input()
    net = network(model, algo, **linear_only(algo))
    net.apply_to()
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, torch.float32, {})
    wanted = {}
    for strength in (1.0, 0.3):
        net.set_multiplier(strength)
        wanted[strength] = model(x)
    net.restore()

    def check() -> None:
        for strength, output in wanted.items():
            again, tensors = create_lycoris_from_weights(strength, path, model)
            assert isinstance(again, LycorisNetwork)
            assert set(tensors) == set(load_file(path))
            again.eval()
            again.apply_to()
            torch.testing.assert_close(model(x), output, atol=2e-5, rtol=2e-5)
            again.restore()

    if not ON_PEER or algo not in ("dylora", "ia3", "full"):
        check()


def test_create_from_a_state_dict():
    model, x = toy_model(), toy_input()
    net = network(model)
    net.apply_to()
    tensors, trained = {key: value.detach().clone() for key, value in net.state_dict().items()}, model(x)
    net.restore()
    again, returned = create_lycoris_from_weights(1.0, None, model, tensors)
    assert returned is tensors
    again.apply_to()
    torch.testing.assert_close(model(x), trained, atol=1e-5, rtol=1e-5)


def test_file_of_another_model_is_refused(tmp_path):
    tensors = {
        "lycoris_nowhere.lora_up.weight": torch.zeros(4, 2),
        "lycoris_nowhere.lora_down.weight": torch.zeros(2, 5),
    }
    refused(lambda: create_lycoris_from_weights(1.0, None, toy_model(), tensors), rule=39, match="nowhere")


# ---------------------------------------------------------------------------------------------------------- stacking
STACKS = [("lora", "lora"), ("lora", "loha"), ("lokr", "lora"), ("glora", "loha"), ("diag-oft", "lora")]


@pytest.mark.parametrize("order", ["first-out-first", "last-out-first"])
@pytest.mark.parametrize("pair", STACKS, ids="+".join)
def test_two_networks_come_off_in_any_order(pair, order):
    model, x = toy_model(), toy_input()
    base = model(x)
    nets = [network(model, algo, seed=3 + 20 * index) for index, algo in enumerate(pair)]
    alone = []
    for net in nets:
        net.apply_to()
        alone.append(model(x))
        net.restore()
    for net in nets:
        net.apply_to()
    assert all(relative_error(model(x), output) > 1e-3 for output in alone)
    leaving, staying = (0, 1) if order == "first-out-first" else (1, 0)
    nets[leaving].restore()
    torch.testing.assert_close(model(x), alone[staying], atol=1e-6, rtol=1e-6)
    nets[staying].restore()
    assert torch.equal(model(x), base)


@pytest.mark.parametrize("pair", STACKS, ids="+".join)
def test_stacked_deltas_add(pair):
    """On one layer each network adds its own delta of the base weight, nothing of the other's (rule 10)."""
    layer = nn.Sequential(nn.Linear(21, 15))
    x = torch.randn(4, 2, 21)
    base = layer(x).detach()
    nets = [network(layer, algo, seed=5 + index, strength=0.7 + index) for index, algo in enumerate(pair)]
    deltas = []
    for net in nets:
        net.apply_to()
        deltas.append(layer(x).detach() - base)
        net.restore()
    for net in nets:
        net.apply_to()
    assert relative_error(layer(x).detach() - base, deltas[0] + deltas[1]) < 1e-5


def test_three_networks_middle_one_leaves():
    model, x = toy_model(), toy_input()
    nets = [network(model, algo, seed=3 + 20 * index) for index, algo in enumerate(("lora", "loha", "lokr"))]
    nets[0].apply_to()
    nets[2].apply_to()
    without_middle = model(x)
    nets[2].restore()
    nets[1].apply_to()
    nets[2].apply_to()
    nets[1].restore()
    torch.testing.assert_close(model(x), without_middle, atol=1e-6, rtol=1e-6)


def test_merging_one_keeps_the_other_acting():
    model, x = toy_model(), toy_input()
    first, second = network(model, "lora", seed=3), network(model, "lora", seed=90)
    first.apply_to()
    second.apply_to()
    both = model(x)
    first.restore()
    first.merge_to(1.0)
    torch.testing.assert_close(model(x), both, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------ merging
DOUBLE_SCALE = ("loha", "lokr")


@pytest.mark.parametrize("strength", [1.0, 0.3, -1.0])
@pytest.mark.parametrize("algo", [*PLAIN, "ia3", "full"])
def test_merge_to_equals_the_hooked_model(algo, strength):
    model, x = toy_model(), toy_input()
    merged = copy.deepcopy(model)
    net = network(merged, algo)
    net.merge_to(strength)
    again = network(model, algo, strength=strength)
    again.apply_to()

    def peer() -> None:
        error = relative_error(merged(x), model(x))
        assert (error > 1e-3) if algo in DOUBLE_SCALE else (error < 1e-5)

    def ours() -> None:
        assert relative_error(merged(x), model(x)) < 1e-5

    differs(1, peer=peer, ours=ours)


def test_precise_merges_do_not_drift():
    """Merging in and out many times in bf16 comes back to the same weight."""
    model = toy_model().to(torch.bfloat16)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    net = network(model, "lora")
    for _ in range(3):
        net.merge_to(1.0, precise=True)
        changed = model.head.weight.clone()
        net.merge_to(-1.0, precise=True)
    assert not torch.equal(changed, start["head.weight"])
    for key, value in model.state_dict().items():
        assert torch.equal(value, start[key]), key


def test_precise_merge_is_rounded_once():
    model = toy_model()
    exact = {adapter.lora_name: adapter for adapter in network(model, "lora").loras}
    expected = {
        name: (adapter.org_module[0].weight.double() + adapter.get_diff_weight(1.0)[0].double()).float()
        for name, adapter in exact.items()
    }
    net = network(model, "lora")
    net.merge_to(1.0, precise=True)
    for adapter in net.loras:
        torch.testing.assert_close(adapter.org_module[0].weight.detach(), expected[adapter.lora_name].detach())


@pytest.mark.parametrize("algo", PLAIN)
def test_onfly_merge_and_restore(algo):
    """A reversible merge gives the base back bit for bit, on the CPU too (rule 7)."""
    model, x = toy_model(), toy_input()
    base = model(x)
    net = network(model, algo)
    net.onfly_merge()
    assert relative_error(model(x), base) > 1e-3
    net.onfly_restore()

    def peer() -> None:
        assert not torch.equal(model(x), base)

    def ours() -> None:
        assert torch.equal(model(x), base)

    differs(7, peer=peer, ours=ours)


def test_is_mergeable():
    assert network(toy_model()).is_mergeable()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_stops_the_merge_before_it_writes(bad):
    model = toy_model()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    net = network(model, "lora")
    with torch.no_grad():
        net.loras[-1].lora_up.weight[0, 0] = bad

    def peer() -> None:
        net.merge_to(1.0)
        assert not torch.equal(model.head.weight, start["head.weight"])

    def ours() -> None:
        with pytest.raises(Exception, match=r"(?i)nan|inf|finite"):
            net.merge_to(1.0)
        assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items())

    differs(8, peer=peer, ours=ours)


# ----------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("algo", [*PLAIN, "tlora", "dylora", "ia3", "full"])
def test_a_step_moves_the_adapter_only(algo):
    model, x = toy_model(), toy_input()
    net = network(model, algo, **linear_only(algo)).train()
    net.apply_to()
    groups = net.prepare_optimizer_params(1e-2)
    assert groups[0]["lr"] == 1e-2
    optimizer = torch.optim.SGD(groups)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    frozen = {name: value.detach().clone() for name, value in model.named_parameters()}
    target = model(x).detach() * 0.5 + 0.1
    losses = []
    for _ in range(6):
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in net.named_parameters())
    for name, value in model.named_parameters():
        assert name not in frozen or torch.equal(value, frozen[name]), name
    if algo != "dylora":
        assert losses[-1] < losses[0]


def test_training_glue():
    net = network(toy_model())
    net.apply_to()
    net.eval()
    net.on_epoch_start(None, None)
    assert net.training
    net.prepare_grad_etc(None, None)
    net.enable_gradient_checkpointing()
    assert len(list(net.get_trainable_params())) == 2 * len(NAMES)
    assert all(parameter.requires_grad for parameter in net.parameters())
    groups = net.prepare_optimizer_params(None)
    assert "lr" not in groups[0]


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr"])
def test_max_norm(algo):
    model = toy_model()
    net = network(model, algo)
    norms = delta_norms(net)
    limit = sorted(norms)[len(norms) // 2] * 0.9
    count, mean, largest = net.apply_max_norm_regularization(limit, torch.device("cpu"))

    def peer() -> None:
        assert int(count) > 0

    def ours() -> None:
        assert count == sum(norm > limit for norm in norms)
        assert all(type(value) in (int, float) for value in (count, mean, largest))
        after = delta_norms(net)
        assert after == pytest.approx([min(norm, limit) for norm in norms], rel=1e-4)
        assert largest == pytest.approx(max(after), rel=1e-4)
        assert mean == pytest.approx(sum(after) / len(after), rel=1e-4)

    differs(47, peer=peer, ours=ours)


@pytest.mark.parametrize("algo", ["glora", "full", "tlora", "dylora", "ia3", "diag-oft"])
def test_max_norm_reaches_every_algorithm(algo):
    net = network(toy_model(), algo, **linear_only(algo))
    if ON_PEER:
        return
    before = delta_norms(net)  # a rotation of a prime width has blocks of one and no delta
    count, mean, largest = net.apply_max_norm_regularization(0.05, torch.device("cpu"))
    assert count == sum(norm > 0.05 for norm in before), "semantics.md rule 47"
    assert count >= len(net.loras) - 1
    after = delta_norms(net)
    assert max(after) <= 0.05 * 1.001
    assert (mean, largest) == pytest.approx((sum(after) / len(after), max(after)), rel=1e-3)


def delta_norms(net: LycorisNetwork) -> list[float]:
    """Frobenius norm of every module's delta at strength one, weight and bias together."""
    deltas = [adapter.get_diff_weight(1.0, adapter.org_module[0].weight.shape) for adapter in net.loras]
    parts = [[part.detach().flatten() for part in delta if part is not None] for delta in deltas]
    return [float(torch.cat(flat).norm()) for flat in parts]


# ------------------------------------------------------------------------------------------------------------ options
def test_conv_dim_and_alpha():
    net = network(toy_model(), conv_dim=5, conv_alpha=4.0)
    for adapter in net.loras:
        conv = isinstance(adapter.org_module[0], nn.Conv2d)
        assert adapter.lora_dim == (5 if conv else 3)
        assert float(adapter.scale) == pytest.approx(4.0 / 5 if conv else 2.0 / 3)


ALIASES = {
    "use_cp": ({"use_cp": True}, "tucker", True),
    "use_conv_cp": ({"use_conv_cp": True}, "tucker", True),
    "use_tucker": ({"use_tucker": True}, "tucker", True),
    "dora_wd": ({"dora_wd": True}, "wd", True),
    "wd_on_output": ({"dora_wd": True, "wd_on_output": False}, "wd_on_out", False),
    "bypass": ({"bypass_mode": True}, "bypass_mode", True),
    "text": ({"dora_wd": "True", "use_tucker": "true"}, "wd", True),
    "text-false": ({"dora_wd": "False"}, "wd", False),
}


@pytest.mark.parametrize("alias", list(ALIASES))
def test_options_reach_the_modules(alias):
    options, attribute, value = ALIASES[alias]
    net = network(toy_model(), **options)
    conv = next(adapter for adapter in net.loras if adapter.lora_name == "lycoris_conv_in")
    assert bool(getattr(conv, attribute)) is value


OWN_ALIASES = {
    "disable_conv_cp": ({"disable_conv_cp": True}, "tucker", False, 44),
    "not disable_conv_cp": ({"disable_conv_cp": False}, "tucker", True, 44),
    "weight_decompose": ({"weight_decompose": True}, "wd", True, 44),
    "wd_on_out": ({"dora_wd": True, "wd_on_out": False}, "wd_on_out", False, 44),
    "rs_lora": ({"rs_lora": True}, "rs_lora", True, 45),
    "rank_dropout_scale": ({"rank_dropout": 0.2, "rank_dropout_scale": True}, "rank_dropout_scale", True, 45),
}


@pytest.mark.parametrize("alias", list(OWN_ALIASES))
def test_documented_options_work(alias):
    """Options that lycoris-lora drops or turns around."""
    options, attribute, value, rule = OWN_ALIASES[alias]
    net = network(toy_model(), **options)
    conv = next(adapter for adapter in net.loras if adapter.lora_name == "lycoris_conv_in")
    seen = bool(getattr(conv, attribute))

    def peer() -> None:
        assert seen is not value or alias == "not disable_conv_cp"

    def ours() -> None:
        assert seen is value

    differs(rule, peer=peer, ours=ours)


def test_constrain_is_constraint():
    net = network(toy_model(), "diag-oft", constrain=0.5)
    assert float(net.loras[0].alpha) == 0.5


@pytest.mark.parametrize(
    ("algo", "option", "attribute", "value"),
    [("ia3", "train_on_input", "on_input", 1), ("tlora", "sig_type", "sig_type", "last")],
)
def test_algorithm_options_reach_the_modules(algo, option, attribute, value):
    given = True if option == "train_on_input" else value
    net = network(toy_model(), algo, **{option: given}, **linear_only(algo))
    seen = getattr(net.loras[0], attribute)

    def peer() -> None:
        assert seen != value

    def ours() -> None:
        assert seen == value

    differs(45, peer=peer, ours=ours)


@pytest.mark.parametrize(("option", "nearest"), [("linear_dims", "linear_dim"), ("dropuot", "dropout")])
def test_misspelled_option_is_refused(option, nearest):
    refused(lambda: create_lycoris(toy_model(), 1.0, linear_alpha=2.0, **{option: 0.5}), rule=44, match=nearest)


def test_unknown_algorithm_is_refused():
    with pytest.raises(Exception, match=r"(?i)lokrr"):
        create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, algo="lokrr")


def test_zero_matched_modules_is_an_error():
    refused(lambda: create_lycoris(nn.Sequential(nn.ReLU()), 1.0, linear_dim=3, linear_alpha=2.0), rule=44)


def test_algo_name_is_case_insensitive():
    assert type(network(toy_model(), "lora", **{}).loras[0]) is lycoris.LoConModule
    net = create_lycoris(toy_model(), 1.0, linear_dim=2, linear_alpha=3.0, algo="LoKr")
    assert type(net.loras[0]) is lycoris.LokrModule


def test_defaults():
    net = create_lycoris(toy_model())
    assert {type(adapter) for adapter in net.loras} == {lycoris.LoConModule}
    assert {adapter.lora_dim for adapter in net.loras} == {4}
    assert {float(adapter.scale) for adapter in net.loras} == {0.25}
    assert net.multiplier == 1.0


def test_train_norm():
    model, x = toy_model(), toy_input()
    base = model(x)
    net = network(model, train_norm=True)
    norms = {adapter.lora_name for adapter in net.loras if isinstance(adapter, lycoris.NormModule)}
    assert norms == {"lycoris_group_norm", "lycoris_blocks_0_norm", "lycoris_blocks_1_norm"}
    for adapter in net.loras:
        if adapter.lora_name not in norms:
            adapter.multiplier = 0.0
    net.apply_to()
    hooked = model(x)
    assert relative_error(hooked, base) > 1e-3
    keys = {key for key in net.state_dict() if key.split(".")[0] in norms}
    assert keys == {f"{name}.{leaf}" for name in norms for leaf in ("w_norm", "b_norm")}
    net.restore()
    for adapter in net.loras:
        if adapter.lora_name in norms:
            adapter.merge_to(1.0)
    torch.testing.assert_close(model(x), hooked, atol=1e-5, rtol=1e-5)
