rule train:
    input:
        data=prepared,
        packing=packed,
        zero=zero_file,
        start=starting_adapter,
    output:
        adapter="results/{run}/adapter/manifest.json",
        metrics="results/{run}/metrics/train.json",
        resources="results/{run}/metrics/train_resources.json",
        loss="results/{run}/metrics/loss.csv",
        telemetry="results/{run}/metrics/telemetry.csv",
    log:
        "results/logs/train/{run}.log",
    conda:
        "../../envs/conda.yaml"
    threads: ranks_here
    resources:
        nodes=nodes,
        # One task a node: zerolora starts the node's ranks. An empty mpi keeps the plugin from wrapping the job in srun.
        tasks=nodes,
        tasks_per_gpu=0,
        gres=gres,
        gpu=all_gpus,
        node_gpus=gpus_here,
        runtime=minutes(resources_of_train),
        mem_mb=memory(resources_of_train),
        mpi="",
        launcher="",
        # No parameter, which would run training again whenever it changes.
        keep_checkpoints=keep_checkpoints,
    params:
        code=code("train"),
        settings=settings("runs", "run", "train"),
        data=data_directory,
        packing=packing_directory,
        model=model_directory,
        weights=weights_directory,
        device=device_of,
        checkpoints="work/checkpoints/{run}",
        output=run_directory,
        logs="results/logs/train/{run}",
    shell:
        "zerolora weights --model {params.model} --weights {params.weights} --device {params.device} &&"
        # Snakemake sets these to the rule's threads, which are those of all ranks together: each rank would start as many,
        # and they would wait for each other, spinning.
        " export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 &&"
        " {resources.launcher} workflow/scripts/record_slurm_step {params.logs}/steps"
        " workflow/scripts/on_gpus {resources.node_gpus} {resources.nodes} {resources.gpu}"
        " zerolora --log {log} train --settings {params.settings:q} --data {params.data}"
        " --packing {params.packing} --zero {input.zero} --weights {params.weights}.json"
        " --checkpoints {params.checkpoints} --output {params.output} --logs {params.logs} --keep-checkpoints {resources.keep_checkpoints} &&"
        " echo finished >> {params.logs}/steps"
