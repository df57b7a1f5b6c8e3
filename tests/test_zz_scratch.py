"""Scratch."""
import copy, io
import pytest, torch, cmoe
def layer(prefix="a", **k):
    c=cmoe.MoEConfig(num_experts=5, top_k=2, hidden_size=16, intermediate_size=8, **k)
    l=cmoe.FusedMoE(c, prefix=prefix)
    l.load_weights((f"experts.{e}.{n}.weight", torch.randn(s)) for e in range(5) for n,s in {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}.items())
    return l
def test_compile(count_compiles):
    f=torch.compile(layer(), fullgraph=True)
    for t in (3,5,17,64,1,2,0): f(torch.randn(t,16), torch.randn(t,5))
    print(count_compiles())
def test_opcheck():
    w=cmoe; l=layer()
    torch.library.opcheck(torch.ops.cmoe.moe_forward.default if hasattr(torch.ops.cmoe.moe_forward,'default') else torch.ops.cmoe.moe_forward, (torch.randn(3,16), torch.randn(3,5), None,None,None, l.layer_token) )
def test_copy():
    l=layer(); m=copy.deepcopy(l); b=io.BytesIO(); torch.save(l.state_dict(), b); b.seek(0); l.load_state_dict(torch.load(b)); torch.save(l,b:=io.BytesIO()); b.seek(0)
    del l; torch.load(b, weights_only=False)
def test_tf():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, MixtralForCausalLM, MixtralConfig, DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM
    k=dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, vocab_size=64, head_dim=8, num_local_experts=8)
    m=Qwen3MoeForCausalLM(Qwen3MoeConfig(**k)).eval()
    print(m.generate(torch.tensor([[1,2,3]]), max_new_tokens=4, do_sample=False))
    m.save_pretrained("/tmp/t/scratch"); Qwen3MoeForCausalLM.from_pretrained("/tmp/t/scratch")
    MixtralForCausalLM(MixtralConfig(**k))(torch.tensor([[1,2,3]])); GptOssForCausalLM(GptOssConfig(**k))(torch.tensor([[1,2,3]]))
    f=torch.compile(m, fullgraph=True); f(torch.tensor([[1,2,3]]))
def test_ds():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    c=DeepseekV3Config(hidden_size=32,intermediate_size=32,moe_intermediate_size=16,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,n_routed_experts=8,n_group=4,topk_group=2,vocab_size=64,first_k_dense_replace=1,num_experts_per_tok=2,q_lora_rank=8,kv_lora_rank=8,qk_rope_head_dim=8,qk_nope_head_dim=8,v_head_dim=8)
    DeepseekV3ForCausalLM(c)(torch.tensor([[1,2,3]]))
def test_export():
    l=layer(); torch.export.export(layer("b"), (torch.randn(3,16),torch.randn(3,5)))
def test_inductor_fusion():
    torch.compile(lambda x: torch.nn.functional.gelu(x)@x.T, dynamic=True)(torch.randn(5,6))
    torch.compile(lambda x: torch.nn.functional.gelu(x)@x.T)(torch.randn(5,6,dtype=torch.bfloat16))
