"""The command line. No torch is imported before a run starts."""

from __future__ import annotations

import signal
import sys

import click

from sentinel_bench import __version__
from sentinel_bench.cli.calibrate import calibrate
from sentinel_bench.cli.docs import docs
from sentinel_bench.cli.leaderboard import leaderboard
from sentinel_bench.cli.new import new
from sentinel_bench.cli.report import report
from sentinel_bench.cli.reproduce import reproduce
from sentinel_bench.cli.run import run
from sentinel_bench.cli.score import score
from sentinel_bench.cli.show import list_, show
from sentinel_bench.cli.submit import submit
from sentinel_bench.cli.suite import suite_
from sentinel_bench.cli.sweep import sweep
from sentinel_bench.cli.validate import validate
from sentinel_bench.errors import SentinelBenchError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sentinel-bench")
def cli() -> None:
    """Attacks on and defenses of decentralized, pipeline-parallel LLM training, measured.

    Start with: sentinel-bench run --attack delay --defense sentinel
    """


for command in (
    *(run, suite_, sweep, list_, show, new, validate, score, report, calibrate),
    *(reproduce, leaderboard, submit, docs),
):
    cli.add_command(command)


def main() -> None:
    """Run the command line; errors that a user can mend are one line, without a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.ClickException, SentinelBenchError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
