"""Names of weights in the published files, written down as facts, beside those of transformers.

A line is ``published | transformers``, with one name where both are equal. ``{key}`` stands for
each of some numbers or words; the sizes are those of the small checkpoints.
"""

import itertools
import re
from collections.abc import Iterable, Mapping

WORDS: dict[str, Iterable[object]] = {
    "wb": ("weight", "bias"),
    "qkvo": "qkvo",
    "mlp": ("gate", "up", "down"),
    "norm": ("input", "post_attention"),
    "n": (1, 2),
    "part": ("norm1", "norm2", "conv1", "conv2"),
    "conv": ("conv1", "conv2"),
    "attn": ("norm", "q", "k", "v", "proj_out"),
    "coder": ("encoder", "decoder"),
    "end": ("conv_in", "conv_out", "norm_out"),
    "stat": ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
    "spatial": ("norm_layer", "conv_y", "conv_b"),
}


def expand(table: str, **numbers: int) -> dict[str, str]:
    """Names of transformers by published names, with ``{key}`` counting below ``numbers[key]``."""
    words: Mapping[str, Iterable[object]] = WORDS | {k: range(n) for k, n in numbers.items()}
    found = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        keys = sorted(set(re.findall(r"{(\w+)}", line)))
        for values in itertools.product(*(words[key] for key in keys)):
            filled = line.format(**dict(zip(keys, values, strict=True)))
            published, _, ours = filled.partition(" | ")
            found[published] = ours or published
    return found


LLAMA = """
model.embed_tokens.weight
model.norm.weight
lm_head.weight
model.layers.{layer}.self_attn.{qkvo}_proj.weight
model.layers.{layer}.mlp.{mlp}_proj.weight
model.layers.{layer}.{norm}_layernorm.weight
"""

# Emu3-community/Emu3-Gen-hf
EMU3 = """
text_model.model.embed_tokens.weight | model.text_model.embed_tokens.weight
text_model.model.norm.weight | model.text_model.norm.weight
text_model.lm_head.weight | lm_head.weight
text_model.model.layers.{layer}.self_attn.{qkvo}_proj.weight | model.text_model.layers.{layer}.self_attn.{qkvo}_proj.weight
text_model.model.layers.{layer}.mlp.{mlp}_proj.weight | model.text_model.layers.{layer}.mlp.{mlp}_proj.weight
text_model.model.layers.{layer}.{norm}_layernorm.weight | model.text_model.layers.{layer}.{norm}_layernorm.weight
"""  # noqa: E501

# BAAI/Emu3-VisionTokenizer; attention is at the coarsest level
EMU3_VISION = """
quantize.embedding.weight
quant_conv.conv.{wb}
post_quant_conv.conv.{wb}
{coder}.conv_in.{wb}
{coder}.conv_out.{wb}
{coder}.time_conv.{time}.conv.conv.{wb}
{coder}.time_res_stack.{block}.norm{n}.{stat}
{coder}.time_res_stack.{block}.{conv}.conv.{wb}
encoder.norm_out.{wb}
encoder.down.{level}.block.{block}.{part}.{wb} | encoder.down_block.down.{level}.block.{block}.{part}.{wb}
encoder.down.{finer}.downsample.conv.{wb} | encoder.down_block.down.{finer}.downsample.conv.{wb}
encoder.down.3.attn.{block}.norm.{wb} | encoder.down_block.down.3.attn_norms.{block}.{wb}
encoder.down.3.attn.{block}.q.{wb} | encoder.down_block.down.3.attn.{block}.q_proj.{wb}
encoder.down.3.attn.{block}.k.{wb} | encoder.down_block.down.3.attn.{block}.k_proj.{wb}
encoder.down.3.attn.{block}.v.{wb} | encoder.down_block.down.3.attn.{block}.v_proj.{wb}
encoder.down.3.attn.{block}.proj_out.{wb} | encoder.down_block.down.3.attn.{block}.out_proj.{wb}
encoder.mid.block_{n}.{part}.{wb} | encoder.middle_block.block_{n}.{part}.{wb}
encoder.mid.attn_1.norm.{wb} | encoder.middle_block.attn_norm.{wb}
decoder.norm_out.{spatial}.{wb}
decoder.up.{level}.block.{deblock}.norm{n}.{spatial}.{wb} | decoder.up_block.up.{level}.block.{deblock}.norm{n}.{spatial}.{wb}
decoder.up.{level}.block.{deblock}.{conv}.{wb} | decoder.up_block.up.{level}.block.{deblock}.{conv}.{wb}
decoder.up.1.upsample.conv.{wb} | decoder.up_block.up.1.upsample.conv.{wb}
decoder.up.2.upsample.conv.{wb} | decoder.up_block.up.2.upsample.conv.{wb}
decoder.up.3.upsample.conv.{wb} | decoder.up_block.up.3.upsample.conv.{wb}
decoder.up.3.attn.{deblock}.norm.{spatial}.{wb} | decoder.up_block.up.3.attn_norms.{deblock}.{spatial}.{wb}
decoder.up.3.attn.{deblock}.q.{wb} | decoder.up_block.up.3.attn.{deblock}.q_proj.{wb}
decoder.up.3.attn.{deblock}.k.{wb} | decoder.up_block.up.3.attn.{deblock}.k_proj.{wb}
decoder.up.3.attn.{deblock}.v.{wb} | decoder.up_block.up.3.attn.{deblock}.v_proj.{wb}
decoder.up.3.attn.{deblock}.proj_out.{wb} | decoder.up_block.up.3.attn.{deblock}.out_proj.{wb}
decoder.mid.block_{n}.norm1.{spatial}.{wb} | decoder.middle_block.block_{n}.norm1.{spatial}.{wb}
decoder.mid.block_{n}.norm2.{spatial}.{wb} | decoder.middle_block.block_{n}.norm2.{spatial}.{wb}
decoder.mid.block_{n}.{conv}.{wb} | decoder.middle_block.block_{n}.{conv}.{wb}
decoder.mid.attn_1.norm.{spatial}.{wb} | decoder.middle_block.attn_norm.{spatial}.{wb}
{coder}.mid.attn_1.q.{wb} | {coder}.middle_block.attn_1.q_proj.{wb}
{coder}.mid.attn_1.k.{wb} | {coder}.middle_block.attn_1.k_proj.{wb}
{coder}.mid.attn_1.v.{wb} | {coder}.middle_block.attn_1.v_proj.{wb}
{coder}.mid.attn_1.proj_out.{wb} | {coder}.middle_block.attn_1.out_proj.{wb}
"""  # noqa: E501

# Alpha-VLLM/Lumina-mGPT-7B-* and leloy/Anole-7b-v0.1-hf, without their VQGAN
CHAMELEON = (
    LLAMA
    + """
model.layers.{layer}.self_attn.q_norm.{wb}
model.layers.{layer}.self_attn.k_norm.{wb}
"""
)

# deepseek-community/Janus-Pro-*
JANUS = """
model.language_model.embed_tokens.weight
model.language_model.norm.weight
lm_head.weight
model.language_model.layers.{layer}.self_attn.{qkvo}_proj.weight
model.language_model.layers.{layer}.mlp.{mlp}_proj.weight
model.language_model.layers.{layer}.{norm}_layernorm.weight
model.generation_embeddings.weight
model.generation_aligner.fc1.{wb}
model.generation_aligner.hidden_layers.0.{wb}
model.generation_head.proj_out.{wb}
model.generation_head.vision_head.{wb}
"""

# deepseek-ai/Janus-Pro-*; q_proj stands for the three parts of qkv
JANUS_RELEASE = """
language_model.model.embed_tokens.weight | model.language_model.embed_tokens.weight
language_model.model.norm.weight | model.language_model.norm.weight
language_model.lm_head.weight | lm_head.weight
language_model.model.layers.{layer}.self_attn.{qkvo}_proj.weight | model.language_model.layers.{layer}.self_attn.{qkvo}_proj.weight
language_model.model.layers.{layer}.mlp.{mlp}_proj.weight | model.language_model.layers.{layer}.mlp.{mlp}_proj.weight
language_model.model.layers.{layer}.{norm}_layernorm.weight | model.language_model.layers.{layer}.{norm}_layernorm.weight
gen_embed.weight | model.generation_embeddings.weight
gen_aligner.layers.0.{wb} | model.generation_aligner.fc1.{wb}
gen_aligner.layers.2.{wb} | model.generation_aligner.hidden_layers.0.{wb}
gen_head.output_mlp_projector.{wb} | model.generation_head.proj_out.{wb}
gen_head.vision_head.{wb} | model.generation_head.vision_head.{wb}
aligner.layers.0.{wb} | model.aligner.fc1.{wb}
aligner.layers.2.{wb} | model.aligner.hidden_layers.0.{wb}
vision_model.vision_tower.patch_embed.proj.{wb} | model.vision_model.embeddings.patch_embedding.{wb}
vision_model.vision_tower.pos_embed | model.vision_model.embeddings.position_embedding.weight
vision_model.vision_tower.norm.{wb} | model.vision_model.post_layernorm.{wb}
vision_model.vision_tower.blocks.{block}.norm{n}.{wb} | model.vision_model.encoder.layers.{block}.layer_norm{n}.{wb}
vision_model.vision_tower.blocks.{block}.attn.qkv.{wb} | model.vision_model.encoder.layers.{block}.self_attn.q_proj.{wb}
vision_model.vision_tower.blocks.{block}.attn.proj.{wb} | model.vision_model.encoder.layers.{block}.self_attn.projection_layer.{wb}
vision_model.vision_tower.blocks.{block}.mlp.fc{n}.{wb} | model.vision_model.encoder.layers.{block}.mlp.fc{n}.{wb}
gen_vision_model.quantize.embedding.weight | model.vqmodel.quantize.embedding.weight
gen_vision_model.quant_conv.{wb} | model.vqmodel.quant_conv.{wb}
gen_vision_model.post_quant_conv.{wb} | model.vqmodel.post_quant_conv.{wb}
gen_vision_model.{coder}.{end}.{wb} | model.vqmodel.{coder}.{end}.{wb}
gen_vision_model.{coder}.mid.0.{part}.{wb} | model.vqmodel.{coder}.mid.block_1.{part}.{wb}
gen_vision_model.{coder}.mid.1.{attn}.{wb} | model.vqmodel.{coder}.mid.attn_1.{attn}.{wb}
gen_vision_model.{coder}.mid.2.{part}.{wb} | model.vqmodel.{coder}.mid.block_2.{part}.{wb}
gen_vision_model.encoder.conv_blocks.{level}.res.{block}.{part}.{wb} | model.vqmodel.encoder.down.{level}.block.{block}.{part}.{wb}
gen_vision_model.encoder.conv_blocks.4.attn.{block}.{attn}.{wb} | model.vqmodel.encoder.down.4.attn.{block}.{attn}.{wb}
gen_vision_model.encoder.conv_blocks.{most}.downsample.conv.{wb} | model.vqmodel.encoder.down.{most}.downsample.conv.{wb}
gen_vision_model.decoder.conv_blocks.{level}.res.{deblock}.{part}.{wb} | model.vqmodel.decoder.up.{level}.block.{deblock}.{part}.{wb}
gen_vision_model.decoder.conv_blocks.0.attn.{deblock}.{attn}.{wb} | model.vqmodel.decoder.up.0.attn.{deblock}.{attn}.{wb}
gen_vision_model.decoder.conv_blocks.{most}.upsample.conv.{wb} | model.vqmodel.decoder.up.{most}.upsample.conv.{wb}
"""  # noqa: E501
JANUS_UNUSED = """
vision_model.vision_tower.attn_pool.latent
vision_model.vision_tower.attn_pool.q.{wb}
vision_model.vision_tower.attn_pool.kv.{wb}
vision_model.vision_tower.attn_pool.proj.{wb}
vision_model.vision_tower.attn_pool.norm.{wb}
vision_model.vision_tower.attn_pool.mlp.fc{n}.{wb}
gen_vision_model.quantize.codebook_used
"""
