"""`python -m lora_compile` is the `lora-compile` command."""

from lora_compile.cli import main

main()
