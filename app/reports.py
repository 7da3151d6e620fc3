"""What the runtime, the tuner, the models and the parser of the command line report, in the user's language.

They report in English, to programs and logs as well. A person who has another language sees those reports in it that
people meet most: they are recognized by their templates, since what crosses a process is a sentence. A test compares
the templates with what is reported. Anything else stays English.
"""

from __future__ import annotations

import re
from functools import cache

from app.language import _, english, localized

REPORTS = (
    # models that are missing, damaged or not supported
    "there is no stored model {name}; {hint}",
    "the store has: {names}",
    "the store {folder} is empty",
    "{name} is being made or removed by another process; wait until it ends",
    (
        "{name} is not a good model name: use letters, digits, '.', '_' and single '-', beginning and ending with "
        "a letter or digit, as in 'name' or 'org/name'"
    ),
    "{folder} is not a stored model: it has no {file}",
    "{file} is missing; {advice}",
    "{file} is damaged (its checksum does not match); {advice}",
    "{file} is damaged (its sha256 does not match); {advice}",
    "{file} is damaged ({error}); {advice}",
    "cannot read {file}: {error}",
    "quantize the model again",
    "{file} has format version {version}, this program reads {own}; {advice}",
    "{folder}: there is no such folder. Name a folder with a Hugging Face checkpoint, or a GGUF file.",
    (
        "{file}: there is no such file. Name a folder with a Hugging Face checkpoint (config.json and "
        "*.safetensors), or a GGUF file."
    ),
    "{folder} holds GGUF files ({files}). Name one of them.",
    "{file} cannot be read ({error}).",
    "{file} is damaged: it is not a JSON file ({error}). {advice}",
    "{file}: ends within the tensor '{tensor}'. {advice}",
    "Download the model again.",
    "{folder}: {missing} of {count} shards are missing: {files}. Download the rest of the model.",
    "{source}: the architecture is not supported ({found}).{near} Supported are {known}: {families}.",
    (
        "{source}: use_bidirectional_attention is set: this model makes embeddings, and its tokens see those "
        "behind them. Take one that generates text."
    ),
    "there is no folder or file {source}; give a checkpoint's folder, a GGUF file, or a name on the hub",
    "{program} has no model {name} here: `lowbit-chat list --elsewhere` lists what there is",
    "{name} is part of the program and cannot be removed",
    (
        "{work} needs {packages}, which this installation leaves out: install the whole program, or do this on a "
        "machine that has it"
    ),
    "making a low-bit model",
    "answering in full precision",
    (
        "{path} is not the checkpoint that {name} was made from, or was changed since: its checksums differ from those "
        "of the model, so make it again (`quantize --force`)"
    ),
    (
        "the checkpoint that {name} was made from ({source}) is not where it was: get it again (`pull`), or name its "
        "folder or GGUF file once, as in `lowbit-chat run PATH --budget exact`"
    ),
    "{name} does not answer exactly, as the settings want, but with the default budget: {error}",
    "do what it says, or choose another budget (F3, `lowbit-chat config set budget`)",
    "exact answers are computed by the CPU backend only",
    "experts are not multiplied in full precision, so this model cannot answer exactly",
    # making models
    "as a chat gets it, perplexity rises {grown} at {size} bits with {count} of 1024 channels compensated: {others}",
    "as a chat gets it, perplexity rises {grown} at {size} bits without compensation: {others}",
    "from {before} to {after}",
    "beyond all numbers",
    "{count} channels, a larger budget, give {size}",
    "4 bits by plain rounding have {size}",
    "{others}, 4 bits by plain rounding have {size}",
    "{others}, 3.5 bits lie between",
    "choose a smaller group size or a larger model",
    (
        "{number} of {count} experts were chosen for fewer than {size} tokens of the calibration text, so they are "
        "rounded plainly"
    ),
    "made of {types} weights: residuals restore those, not the model before they were quantized",
    "the store has a model {name} already; replace it with --force or choose another name with --name",
    (
        "{name} needs {size} more on the disk of {folder}, and {free} is free; free some space and run the same "
        "command again"
    ),
    "stopped; the same command continues where it stopped",
    "{target} exists; remove it, or give another path",
    "{name} was quantized without residuals, so none can be added; export it as it is",
    "the export was stopped; nothing of it is kept",
    (
        "{checkpoint} has no tokenizer (tokenizer.json or tokenizer.model); take the tokenizer files from where "
        "the model came from and put them beside its weights"
    ),
    "the {purpose} text is too short: it has {count} tokens, 2 are needed",
    "bits must be {least}, {most} or a number between, not {bits}",
    "group_size must be a multiple of 32{also}, not {size}",
    "residual_bits must be one of {known}, not {bits}",
    "{method} has no 2 bits; choose the method trellis, or 3 bits",
    # downloads
    "the download was stopped; the same command continues it",
    (
        "{what}: {error}, after {tries}. Check the network (and HTTPS_PROXY, HF_ENDPOINT if set); the same "
        "command continues the download."
    ),
    "stopped; the same command begins the download again",
    "{file}: {done} of {size}, {speed}/s, {time} left",
    "{size} downloaded",
    "the hub does not give {name}: asking a package index",
    "another process is fetching {name}; waiting",
    (
        "{name} is not a name on the hub; use owner/name, as in Qwen/Qwen2.5-0.5B-Instruct (letters, digits, '-', "
        "'_' and '.'; no address, no path), or owner/name:TYPE for a GGUF file, as in Qwen/Qwen3-4B-GGUF:Q8_0."
    ),
    (
        "{name} is gated (the hub answers {status}): accept its terms at {page}, then log in with `hf auth login` "
        "or set HF_TOKEN to a token that may read it."
    ),
    (
        "{name} does not exist, or is private or gated (the hub answers 401): check the name, and log in with `hf "
        "auth login` or set HF_TOKEN to a token that may read it."
    ),
    "the hub knows no model {name} (404): check the spelling at {host}; for a private one set HF_TOKEN.",
    "{name} has no revision {revision}: see {page} for its branches and tags.",
    (
        "{name} ({revision}) is not in the cache {folder}, and HF_HUB_OFFLINE forbids access to the hub; unset it "
        "to download the model."
    ),
    (
        "{size} are still to come, {spare} must stay free, and the disk of {folder} has {free} free: make room, "
        "or set HF_HOME to a folder on another disk."
    ),
    "{name} has no {file}, so it is not a Hugging Face checkpoint; choose another repository.",
    (
        "{name} has no weights in safetensors or GGUF{found}: choose a repository that has, or convert it with "
        "transformers' save_pretrained."
    ),
    (
        "{model} cannot be fetched. The hub: {first} A package index: {second} Or get {file} some other way, and "
        "give its path in place of the name."
    ),
    "the certificate of {host} is not trusted ({error}): check the clock, or set SSL_CERT_FILE.",
    "asking for {name}",
    "asking {host} for {name}",
    "{what}: {error}; trying again {when}",
    "in {delay} s",
    "no connection to {host}",
    "no connection to {host} ({error})",
    "{host} stopped sending data",
    "the connection was cut",
    "1 try",
    "{count} tries",
    "{file}: the checksum is wrong; downloading the file again",
    "another run is finishing; waiting",
    # loading and running
    "{model} would get less than its usual memory: {plan}",
    "the load was stopped",
    "a context of {context} tokens is not possible with this model: choose 1 to {most}",
    (
        "a context of {context} tokens was requested, and the model knows positions up to {most}: choose a "
        "context from 1 to {largest}"
    ),
    "{wanted} blocks on the GPU were requested, and the model has {blocks}: choose 0 to {most}",
    "{backend} cannot run here, because {reason}; or use another backend",
    "{backend} was requested",
    "the CPU backend",
    "the GPU backend",
    "the reference backend",
    "the GPU with the processor",
    "no NVIDIA card was found",
    "no driver answers for {card}",
    "install NVIDIA's driver, or make the card visible to this container",
    "{card} has compute capability {version}, and the kernels need {least}",
    "torch was built without CUDA",
    "install a CUDA build of torch (see pytorch.org) into the environment",
    "the variable CUDA_VISIBLE_DEVICES hides every card",
    "unset CUDA_VISIBLE_DEVICES",
    "the card stopped working in this process ({error})",
    "restart the program",
    "{reason}, so {backend} is not used",
    "the CPU kernels use {variant}",
    "the CPU kernels can't be built ({error})",
    "{card} was found, and Triton's kernels run on it",
    "plain torch runs the model, slowly",
    "not enough memory: needs {plan}, but {free} is free now; {advice}",
    "{size} (weights {weights}, cache {cache} for {count} tokens, buffers {buffers}, margin {margin})",
    "{size}, residuals {residuals}",
    "{size}; in addition {what}, mapped",
    "residuals {size}",
    "a context of {count} tokens fits",
    "a context of {count} tokens fits, or {advice}",
    "another kind of cache takes less ({shares})",
    "another kind of cache takes less ({shares}), or {advice}",
    "turn off compensation, whose residuals take {size}, or {advice}",
    "use fewer bits or a smaller model, or {advice}",
    "close other programs",
    "close other programs ({holder})",
    "{program} holds {size}",
    "{size} of this container's {all}",
    "{size} less",
    "there is no backend {name} in this version; choose one of {names}",
    (
        "the prompt has {count} tokens and the context holds {context}, the answer included: shorten the "
        "conversation, or load the model with a longer context"
    ),
    (
        "not enough GPU memory ({error}): use a shorter context, fewer bits or a smaller model, or close other "
        "programs that use the GPU"
    ),
    (
        "the GPU stopped working ({error}): load the model again; if that fails, restart the program, or use the "
        "CPU backend"
    ),
    "the graphics card no longer responds: {reason}",
    "the model has been unloaded: load it again",
    "the weights do not fit",
    "{count} requests are waiting already: try again later",
    "a model is being made or downloaded already: wait until that is done, or stop it",
    "no model is loaded, so there is nothing to tune: load one first",
    "the server is shutting down",
    "the program was updated while it ran: start it again",
    "only an assistant's message can be continued, and the last message is not one",
    "the model's chat template does not accept these messages: {error}",
    "the JSON schema cannot be enforced: {error}",
    # serving
    "listening on {host} lets other machines in, so it needs a token: give one with --token, or listen on 127.0.0.1",
    "all addresses",
    "a token must be 1 to 512 visible ASCII characters without spaces",
    "cannot listen on port {port}: choose one from 0 to 65535",
    "cannot listen on {host} port {port}: {error}; choose another",
    "cannot listen on {host}: {error}",
    # measuring and tuning
    "the measurement was stopped",
    "the evaluation was cancelled",
    "the tuning was stopped. Its measurements are kept; start it again to continue",
    "the text has {count} tokens; at least 2 are needed to score one",
    "a slowdown budget is from 0 to {most} percent, not {budget}",
    "a slowdown budget must be above 0 and at most 100 percent, not {budget}",
    "a k_chunk and a budget exclude each other: leave out one of them",
    "exact answers are not compensated: leave out k_chunk and the budget of prompts",
    "k_chunk is {k_chunk}; it counts channels of {all}, so give a number from 0 to {most}",
    "{bits} bits can't be simulated; give 3, 3.5 or 4",
    "{layer} of block {number}",
    "as good as full precision, {speed} than low bits alone ({how})",
    "within {loss} of full precision, {speed} than low bits alone ({how})",
    "low bits alone",
    "low bits, compensated within the budget",
    "low bits with all residuals",
    "no drafts",
    "{count} tokens drafted per round, {share} accepted",
    "{loss} slower",
    "{loss} faster",
    "no slower",
    "{way}: KL {kl} nats a token, same top token {same}, perplexity {perplexity} ({grown})",
    "the source's own weights, kept bit for bit: they lose nothing",
    "{kv} cache: KL {kl}, same top token {same}",
    "so {kv} is the default",
    "4-bit cache: not checked with this model",
    "within {budget}",
    "on battery",
    "the clock may reach {share} of its highest",
    # what works less well than it could
    "tuning failed, so {instead}: {error}",
    "the prompts of {model} are read without error compensation",
    "run `lowbit-chat tune-device --force`",
    "how {card} is connected to main memory is unknown, so only measuring tells what its link can do",
    "update the card's driver, or look with: nvidia-smi -q",
    "{model} has the weights of its file, so there is nothing to compensate",
    "a slowdown budget is for models that were rounded here; quantize a better source of it",
    "{model} was stored without residuals, so there is nothing to compensate with",
    "quantize it again with --residual-bits 4",
    "a context of {context} tokens is too short to time decoding in",
    "choose one of at least {least} tokens, or a fixed k_chunk",
    "the {kv} cache, which was asked for, damages answers of {model}: {losses}",
    "set kv to auto, or leave out --kv",
    "{card} uses {lanes} PCIe lanes, so little can be compensated",
    "put it into a slot with more lanes, or look at the mainboard's settings",
    "use a shorter context, or close other programs that use the GPU",
    # steps of work
    "loading {model}",
    "loading {model}: {plan}",
    "opening {model}",
    "compiling {count} for this processor, once",
    "compiling the GPU's kernels, which takes up to a minute the first time",
    "starting the GPU's kernels",
    "{count} kernels",
    "tuning {model} for {device}: finding the compensation that {budget} slowdown allows; done once",
    "refining {budget} for {model}",
    "tuning {model}: {work}",
    "finding the compensation that {budget} % more time to the first word allows; done once",
    "timing {target} decoding of {model} with drafts and without, and what it loses",
    "measuring what {model} loses: {way}, {kv} cache",
    "comparing answers of {model} over the {kv} cache with exact ones",
    "reading the answer as generated",
    "reading it without compensation",
    "{done} of {count} tokens",
    "perplexity {perplexity} after {done} of about {count} tokens",
    "reading a text without compensation",
    "reading a text with the setting for {budget} %",
    "decoding with the setting for {budget} % and without",
    "timing {layers} with {count} channels per 1024 compensated",
    "Finding the blocks that need 4 bits",
    "Finding the weights that matter most",
    "Reading the checkpoint",
    "Block {number} of {count}",
    "The block that predicts further tokens",
    "Converting the tokenizer",
    "Output head and perplexity",
    "Verifying what was written",
    "{model} is ready",
    "writing {target}",
    "fetching the package {package} with pip",
)
"""Reports of the runtime, the tuner and the models. Numbers in them are written as the user's language has them."""
PARSER = (
    "Usage: {usage}", "Try '{command}' for help.", "Error: {message}", "Arguments", "Options", "Commands", "Aborted!",
    "required", "default: {default}", "env var: {var}", "Show this message and exit.", "Missing command.",
    "No such command {name!r}.", "{message}. Did you mean {name}?", "No such option: {name}",
    "No such option: {name} (Possible options: {names})", "Missing argument {name}.", "Missing option {name}.",
    "Missing argument {name}. {choices}", "Missing option {name}. {choices}", "Choose from:\n\t{choices}",
    "Invalid value: {message}", "Invalid value for {name}: {message}", "Option {name} requires {what}", "an argument.",
    "Option {name} does not take a value.", "Got unexpected extra argument(s) ({names})",
    "{value} is not a valid {kind}.", "int", "float", "{value} is not in the range {range}.",
    "{value} is not one of {choices}.", "File {path} does not exist.", "Path {path} does not exist.",
)  # fmt: skip
"""What typer says itself."""
SYSTEM = (
    "No such file or directory", "Permission denied", "Is a directory", "Not a directory", "File exists",
    "No space left on device", "Read-only file system", "Address already in use", "Connection refused",
)  # fmt: skip
"""Errors of the operating system, which Python has in English."""

_WORDS = {"budget", "count", "delay", "done", "kv", "layer", "model", "number", "size", "target"}
"""Places for one word, or a number with its unit: what is longer belongs to another report."""
_WORD = r"\S+?(?: (?:%|[kMG]?B))?"
_PLACE = r"\{(\w+)(?:!r)?\}"
_NUMBER = r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?( ?(%|[kMG]?B))?"


def reported(message: str, otherwise: str | None = None) -> str:
    """A report in the user's language.

    Args:
        message: The report, in English.
        otherwise: What to return for an unknown one in another language than English; None: the report itself.
    """
    if english():
        return message
    for form, template in _forms():
        if (found := form.fullmatch(message)) is not None:
            values = {key: localized(text) if re.fullmatch(_NUMBER, text) else reported(text)
                      for key, text in found.groupdict().items()}  # fmt: skip
            return _(template, **values)
    if "; " in message and otherwise is None:
        return _("; ").join(map(reported, message.split("; ")))
    return message if otherwise is None else otherwise


@cache
def _forms() -> list[tuple[re.Pattern[str], str]]:
    """Patterns of the templates: first by how much is certain at the beginning, then by how much at all."""

    def certain(template: str) -> tuple[int, int]:
        return -len(re.split(_PLACE, template)[0]), -len(re.sub(_PLACE, "", template))

    templates = sorted((*REPORTS, *PARSER, *SYSTEM), key=certain)
    return [(re.compile(_pattern(one), re.DOTALL), one) for one in templates]


def _pattern(template: str) -> str:
    """A place ends where the text behind it first occurs, once and for all: a long message costs no more than that."""
    first, *parts = re.split(_PLACE, template)  # by turns a text, and the name of a place
    places = [
        (f"(?P<{name}>{_WORD if name in _WORDS else '.*?'})", re.escape(text))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    ended = "".join(f"(?>{place}{text})" for place, text in places[:-1])
    return re.escape(first) + ended + "".join(place + text for place, text in places[-1:])
