"""The engines that train an adapted model: DeepSpeed, DDP and FSDP2."""
