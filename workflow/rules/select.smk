# Rows to train on: first what no answer is selected to, then the selections. No model is loaded.
rule held_out:
    input:
        job("evaluated"),
    output:
        "results/held_out/{questions}.jsonl",
    log:
        "results/logs/held_out/{questions}.log",
    localrule: True
    params:
        code=code("held_out"),
        settings=settings("held_out"),
        names=names("held_out"),
    shell:
        "zerolora --log {log} stage held_out {wildcards.questions} {params.names} --settings {params.settings:q}"


rule select:
    input:
        data=of("results/data/{dataset}/manifest.json"),
        prompts=of("results/data/{dataset}/prompts.arrow"),
        samples=of("results/samples/{sample}/manifest.json"),
        held_out=expand(
            "results/held_out/{questions}.jsonl", questions=JOBS.names["questions"]
        ),
    output:
        manifest="results/selections/{selection}/manifest.json",
        rows="results/selections/{selection}/rows.jsonl",
        page="results/selections/{selection}/select.html",
        metrics="results/selections/{selection}/metrics.json",
    log:
        "results/logs/select/{selection}.log",
    localrule: True
    params:
        code=code("select"),
        settings=settings("select"),
        names=names("select"),
    shell:
        "zerolora --log {log} stage select {wildcards.selection} {params.names} --settings {params.settings:q}"
