"""A language model that transformers splits over the ranks (tp_plan="auto"). It must generate the
same tokens as on one rank. Also measures the time of a token, beside gloo.

The model has random weights and is not downloaded.
"""

import tempfile
import time
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from common import passed
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, ROUNDS = 24, 9
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def generate(model: LlamaForCausalLM) -> list[int]:
    prompt = torch.arange(1, 9).unsqueeze(0)
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0].tolist()


def split_over(backend: str) -> LlamaForCausalLM:
    """The model, split over a group of this backend. transformers would use the default group."""
    make = torch.distributed.init_device_mesh

    def mesh(*args, mesh_dim_names, **more):
        override = {"tp": backend} if "tp" in mesh_dim_names else None
        return make(*args, mesh_dim_names=mesh_dim_names, backend_override=override, **more)

    with mock.patch("torch.distributed.init_device_mesh", mesh):
        model = LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto").eval()
    assert dist.get_backend(model._device_mesh["tp"].get_group()) == backend
    return model


def median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


dist.init_process_group("mycoll")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, 0)
if dist.get_rank() == 0:
    torch.manual_seed(5)
    LlamaForCausalLM(CONFIG).save_pretrained(folder[0])
dist.barrier()
whole = LlamaForCausalLM.from_pretrained(folder[0]).eval()
models = {name: split_over(name) for name in ("mycoll", "gloo")}

want = generate(whole)
for name, model in models.items():
    weight = model.model.layers[0].self_attn.o_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    assert local.numel() * dist.get_world_size() == CONFIG.hidden_size**2, local.shape
    assert generate(model) == want, name

took: dict[str, list[float]] = {"one rank": [], **{name: [] for name in models}}
for _ in range(ROUNDS):
    for name, model in {"one rank": whole, **models}.items():
        dist.barrier()
        began = time.perf_counter()
        generate(model)
        took[name].append((time.perf_counter() - began) / TOKENS)
if dist.get_rank() == 0:
    for name, seconds in took.items():
        print(f"decode, {name}: {1e3 * median(seconds):.2f} ms a token", flush=True)
    ratio = median([g / m for g, m in zip(took["gloo"], took["mycoll"], strict=True)])
    print(f"decode, gloo / mycoll: {ratio:.2f}", flush=True)
passed("transformers, tensor parallel", transformers.__version__)
