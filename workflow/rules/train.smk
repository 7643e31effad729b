rule train:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        stats=of("results/data/{dataset}/stats.json"),
        packing=of("results/{packed}/packing/manifest.json"),
        packing_stats=of("results/{packed}/packing/stats.json"),
        zero=of("results/{rendered}/zero.json"),
        reference=job("reference_files"),
        start=job("start_files"),
        tasks=job("validation_tasks"),
    output:
        adapter="results/{run}/adapter/manifest.json",
        metrics="results/{run}/metrics/train.json",
        resources="results/{run}/metrics/train_resources.json",
        loss="results/{run}/metrics/loss.csv",
        telemetry="results/{run}/metrics/telemetry.csv",
    log:
        "results/logs/train/{run}.log",
    threads: job("training_cores")
    resources:
        **resources_of("train"),
        nodes=job("nodes"),
        # One task for each node: zerolora starts the node's ranks. With an empty mpi the plugin does not use srun.
        tasks=job("nodes"),
        tasks_per_gpu=0,
        mpi="",
        launcher="",
        # Not a parameter: a change would run training again.
        keep_checkpoints=job("keep_checkpoints"),
    params:
        code=code("train"),
        settings=settings("train"),
        names=names("train"),
        model=path_of("resources/models/{model}"),
        weights=path_of("resources/weights/{model}"),
        device=job("device"),
        logs=below("results/logs/train/{run}"),
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        # Snakemake sets these to the rule's threads, the total of all ranks. Each rank would start as many threads, which
        # spin while they wait for each other.
        " export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 &&"
        ' {resources.launcher} "$ZEROLORA_SCRIPTS/record_slurm_step" {params.logs}/steps'
        ' "$ZEROLORA_SCRIPTS/on_gpus" {resources.node_gpus} {resources.nodes} {resources.gpu}'
        " zerolora --log {log} stage train {wildcards.run} {params.names} --settings {params.settings:q}"
        " --keep-checkpoints {resources.keep_checkpoints} &&"
        " echo finished >> {params.logs}/steps"
