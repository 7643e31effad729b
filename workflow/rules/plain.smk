# Stages that need no rule of their own: files in, files out, on the machine that runs Snakemake.
for stage in ALL_STAGES.values():
    if stage.rules != PLAIN:
        continue

    rule:
        name:
            stage.name
        input:
            of(*stage.reads),
        output:
            *stage.outputs,
        log:
            f"results/logs/{stage.log}",
        localrule: True
        params:
            code=code(stage.name),
            settings=settings(stage.name),
            names=names(stage.name),
            # Not `stage` in the shell, which is formatted when the job runs, after this loop.
            job=job_of(stage.name),
        shell:
            "zerolora --log {log} stage {params.job} {params.names} --settings {params.settings:q}"
