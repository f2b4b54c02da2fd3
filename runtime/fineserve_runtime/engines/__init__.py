"""The engine side of the runtime: real vLLM engines whose KV blocks are slabs of one shared region.

`api` is the contract between engines and driver; `host.start_host` builds engines. Only this package imports torch
and vllm, and of it only `torch_region`, `weights`, `tiny_model` and the modules named ``vllm_*``.
"""
