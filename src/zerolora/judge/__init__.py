"""MT-bench's protocol: base and tuned model answer questions of two turns, and a judge at an endpoint compares them.

prompts.jsonl holds the judge's prompts, unchanged from FastChat (Apache-2.0): its file
fastchat/llm_judge/data/judge_prompts.jsonl of https://github.com/lm-sys/FastChat, commit
0e6d3e4beaab66f4d3f93db72541a4abab8af28d.
"""
