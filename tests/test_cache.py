"""The ragged static cache against plain full forward passes of a small LLaMA."""

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from csd_policy.cache import RaggedCache


def small_model(dtype: torch.dtype) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaModel(config).to(dtype).eval()


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ragged_windows_equal_full_passes(dtype: torch.dtype, tolerance: float) -> None:
    """Random acceptance per row, prompts of different lengths, stale slots full of junk."""
    model, generator = small_model(dtype), torch.Generator().manual_seed(1)
    lengths, window, total = torch.tensor([3, 9, 5]), 4, 40
    truth = torch.randint(40, (3, total), generator=generator)
    cache = RaggedCache(model.config, total + window)
    prompt = torch.arange(int(lengths.max())).expand(3, -1)
    model(input_ids=truth[:, : prompt.shape[1]], **cache.at(prompt))  # right padding is junk
    storage = [layer.keys.data_ptr() for layer in cache.layers]
    done = lengths.clone()
    while (done < total).any():
        slots = done[:, None] + torch.arange(window)
        kept = torch.randint(0, window + 1, (3,), generator=generator)
        ids = truth.gather(1, slots.clamp(max=total - 1))
        wrong = torch.randint(40, ids.shape, generator=generator)
        ids = torch.where(torch.arange(window) < kept[:, None], ids, wrong)
        hidden = model(input_ids=ids, **cache.at(slots)).last_hidden_state
        for row in range(3):
            fed = torch.cat([truth[row, : done[row]], ids[row]])[None]
            full = model(input_ids=fed).last_hidden_state[0, -window:]
            assert (hidden[row] - full).abs().max() < tolerance
        done = (done + kept).clamp(max=total)
        for layer in cache.layers:  # poison what was rolled back: the next window must not see it
            for row in range(3):
                layer.keys[row, :, done[row] :] = 1e4
                layer.values[row, :, done[row] :] = 1e4
    assert storage == [layer.keys.data_ptr() for layer in cache.layers]


def test_layers_on_several_devices() -> None:
    """Slots lie on one device, keys and values of a layer on its own, as with ``device_map``."""
    cache = RaggedCache(small_model(torch.float32).config, 8)
    cache.at(torch.tensor([[0, 1]]))
    states = torch.ones(1, 2, 2, 4, device="meta")
    keys, values = cache.layers[1].update(states, states)
    assert keys.shape == values.shape == (1, 2, 8, 4) and keys.device.type == "meta"


@torch.inference_mode()
def test_one_graph_for_all_windows() -> None:
    model = small_model(torch.float32)
    cache = RaggedCache(model.config, 24)

    def window(ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, **cache.at(slots)).last_hidden_state

    ids, slots = torch.randint(40, (2, 3)), torch.tensor([[0, 1, 2], [4, 5, 6]])
    window(ids, slots)  # allocates
    explained = torch._dynamo.explain(window)(ids, slots)
    assert explained.graph_break_count == 0
