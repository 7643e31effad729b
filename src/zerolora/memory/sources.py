"""The source of each term's formula, for estimate.json."""

SOURCES = {
    "frozen_weights": "2 or 4 bytes a parameter, 4 bits with constants for QLoRA; sharded at stage 3 "
    "(arXiv 1910.02054 section 3; 2305.14314 section 3)",
    "adapter_weights": "φ parameters: arXiv 2106.09685 section 4.1, 2402.09353, 2205.05638",
    "gradients": "2 bytes of each trained parameter, 4 without DeepSpeed; sharded from stage 2 (arXiv 1910.02054)",
    "master": "4 bytes of each trained parameter; sharded from stage 1 (arXiv 1910.02054)",
    "moments": "8 bytes of each trained parameter; sharded from stage 1 (arXiv 1910.02054)",
    "activations": "what the step's operations save and allocate (zerolora/memory/decoder.py), at the peak; less the "
    "gradients that are not computed yet",
    "logits": "logits, their fp32 copy, log-softmax and gradients (transformers/loss/loss_utils.py), at the peak",
    "buffers": "buckets, gathered weights, norms: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, "
    "partitioned_param_coordinator.py",
    "reserve": "memory beside torch's tensors: estimate.reserve, or the three shares below "
    "(zerolora/memory/reserve.py)",
    "reserve_context": "CUDA's context, 426 MiB: unslothai/unsloth-zoo#1053; not measured here",
    "reserve_nccl": "12 MiB for each of 32 channels of a group of ranks, none for one rank: NVIDIA/nccl#1685, "
    "NVIDIA/nccl#986; not measured here",
    "reserve_allocator": "2.4 % of the tensors, which torch's allocator holds besides: "
    "vllm-project/compressed-tensors#587; not measured here",
    "processes": "a rank that has loaded nothing: benchmarks/process_memory.py",
    "loading": "the largest weight, in transfer to the GPU, and shards that stay on the host; on CPU ranks the "
    "weights: train/base_model.py",
    "page_cache": "pages of the weights' files, mapped (safetensors) and shared by a node's ranks: docs/speed.md",
    "offload": "states and buffers: stage_1_and_2.py, stage3.py",
    "layer_inputs": "with activation_offload: each layer's input, in pinned blocks of a power of two: "
    "train/activation_offload.py, ATen/core/CachingHostAllocator.h",
    "pinned": "buffers between NVMe and GPU: partitioned_param_swapper.py",
    "ranks": "on CPU ranks: what would be in GPU memory",
    "heap": "free blocks of a CPU rank's heap: measured, benchmarks/memory/measure.py",
    "saving": "the copies that a checkpoint is written from: train/engines/engine.py, train/checkpoint/store.py",
}
