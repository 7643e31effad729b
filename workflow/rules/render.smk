checkpoint render:
    input:
        estimate="results/{run}/estimate.json",
    output:
        zero="results/{run}/zero.json",
        reasons="results/{run}/render.json",
    log:
        "results/logs/render/{run}.log",
    # What does not fit now will not fit in a minute either, whatever the profile says of jobs.
    retries: 0
    localrule: True
    conda:
        "../../envs/conda.yaml"
    params:
        code=code("render"),
        settings=settings("runs", "run", "render"),
        model=model_directory,
        weights=weights_directory,
    shell:
        "zerolora --log {log} render --settings {params.settings:q} --model {params.model}"
        " --weights {params.weights} --estimate {input.estimate} --output {output.zero} --reasons {output.reasons}"
