# The command for the config beside it, on two GPUs.
NPROC_PER_NODE=2 xtuner train internlm2_chat_7b_qlora_oasst1_e3 --deepspeed deepspeed_zero2
