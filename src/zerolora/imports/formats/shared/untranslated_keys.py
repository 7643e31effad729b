"""Rules of keys without an equal here that several tools have: idle ones, and those that change the result."""

from zerolora.imports.formats.import_format import idle, lost, unlike

REENTRANT = idle("reentrant checkpointing is never used")
TOKEN = idle("the token of the Hub's own command line is used")
PREPARED_ROWS = idle("prepared rows are in results/data/")
WORKERS = idle("prepare uses all cores; `--workers` limits it")
TOKENIZER = idle("the tokenizer in the model's directory is used")
LOGS = idle("all output is in results/logs/")
RERUN = idle("stages rerun when their inputs change")
EVALUATED = idle("held-out rows are always evaluated")
EVALUATION_BATCH = idle("chosen by evaluate.batch: auto")
ISOLATED = idle("rows in a packed row do not attend to each other")
NORMS = lost("norms keep the model's dtype")
WHOLE_ROW = lost("train.attention covers the whole row")
NEW_ROWS = lost("rows of added tokens are initialized to the mean of the others")
SHUFFLED = lost("rows are always shuffled by the seed")
FROM_SCRATCH = unlike("randomly initialized weights")
MEDIA = unlike("rows with images, video or audio")
IMAGES = unlike("rows with images")
LAUNCHER = idle("set by the launcher")
LOADED_IN_PARTS = idle("weights are always loaded in parts")
