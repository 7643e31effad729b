include: "workflow/Snakefile"


# A target named in an included file is not the default one here, so it is named again.
rule default:
    default_target: True
    input:
        rules.all.input,
