"""`python -m trainer.submit --name digits_1 --config config.yaml ...`: sends a training or tuning job to a service.

`scripts/submit_vertex` and `scripts/submit_ai_platform` run it. First everything is checked here: the job file with every key,
flag and metric (`training_input.py`), names, region, buckets. Then the package is built (`sdist.py`) and put into the staging
bucket under a name that has its digest, so that equal packages are sent once. The request of `jobs.py` goes to the service
through gcloud, which has the credentials. A file with `hyperparameters` makes a tuning job.

AI Platform's training was shut down on 31 January 2025; it is here for whoever still has an endpoint of its interface.

Exit codes: 0 sent (or printed), 1 gcloud or the bucket failed, 2 wrong flags or a wrong file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Optional

import yaml

from trainer import jobs, sdist, storage, tool_flags, training_input
from trainer.errors import DataError, UsageError
from trainer.training_input import TrainingInput

AI_PLATFORM, VERTEX = SERVICES = ('ai_platform', 'vertex')
_NAME = {AI_PLATFORM: re.compile(r'[A-Za-z]\w{0,127}'), VERTEX: re.compile(r'.{1,128}')}
_REGION = re.compile(r'[a-z]+-[a-z]+\d+')
_CONSOLE = 'https://console.cloud.google.com/vertex-ai/training'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Sends the job that the flags describe.

    Args:
        argv: flags without the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    return tool_flags.report('trainer.submit', lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    options, args = parse(argv)
    return submit(training_input.load(options.config, args), options)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The settings, and the flags behind `--` for the trainer.

    Raises:
        UsageError: a setting is wrong.
        SystemExit: `--help` was asked for and has been printed.
    """
    parser = tool_flags.Parser(
        prog='python -m trainer.submit',
        usage='%(prog)s --service SERVICE --name NAME --staging_bucket gs://BUCKET [flags] [-- FLAGS_OF_THE_TRAINER]',
        description='Sends a training job, or a tuning job where the file tunes something, to a service.',
        epilog="What stands after -- takes the place of the file's args. AI Platform's training ended in January 2025.",
    )
    parser.add_argument('--service', choices=SERVICES, default=VERTEX, help='%(choices)s [%(default)s]')
    parser.add_argument('--name', default='', help='of the job')
    parser.add_argument('--config', metavar='FILE', default='config.yaml', help='config.yaml or hptuning.yaml [%(default)s]')
    parser.add_argument('--region', default='us-central1', help='where it runs [%(default)s]')
    parser.add_argument('--staging_bucket', metavar='gs://BUCKET', default='', help='where the package is put')
    parser.add_argument('--job_dir', metavar='gs://...', default='', help="folder for the results [the file's jobDir]")
    parser.add_argument('--project', default='', help="Google Cloud project [gcloud's]")
    parser.add_argument('--dry_run', action='store_true', help='print the request and send nothing')
    options, args = parser.parse(argv)
    if not options.name:
        raise UsageError('--name: missing; expected the name of the job, such as digits_1')
    if not _NAME[options.service].fullmatch(options.name):
        raise UsageError(f'--name={options.name}: expected at most 128 letters, digits and _, a letter first')
    if not _REGION.fullmatch(options.region):
        raise UsageError(f'--region={options.region}: expected one such as us-central1')
    if options.job_dir:
        training_input.check_gs_path(options.job_dir, '--job_dir')
    return options, args


def submit(job: TrainingInput, options: argparse.Namespace) -> int:
    """Builds, stages and sends; with `--dry_run` prints the request.

    Raises:
        UsageError: something is missing that the service needs.
        DataError: gcloud fails.
    """
    if not options.job_dir and 'jobDir' not in job.values:
        raise UsageError(f'--job_dir: missing, and {job.path} has no jobDir; expected the folder for the results, gs://...')
    with tempfile.TemporaryDirectory(prefix='trainer-submit-') as folder:
        package = path = ''
        if not job.has_image:
            training_input.check_gs_path(options.staging_bucket, '--staging_bucket')
            path = sdist.build(folder)
            package = storage.join(options.staging_bucket, 'packages', sdist.digest(path), os.path.basename(path))
        request = make_request(job, options, package)
        if options.dry_run:
            print(json.dumps(request, indent=2))
            return 0
        if shutil.which('gcloud') is None:
            raise UsageError('gcloud is not on PATH; install the Google Cloud SDK, or send what --dry_run prints yourself')
        if path:
            # gcloud's own upload: one set of credentials for all that is sent.
            _run_gcloud(['gcloud', 'storage', 'cp', '--no-clobber', path, package])
            print(f'staged {package}')
        command = make_command(job, options, package, config=os.path.join(folder, 'request.yaml'), request=request)
        answer = _run_gcloud(command)
    _say_how_to_follow(options, job, answer)
    return 0


def make_request(job: TrainingInput, options: argparse.Namespace, package: str) -> dict[str, Any]:
    """The body that goes to the service."""
    if options.service == AI_PLATFORM:
        make = jobs.make_ai_platform_job
    else:
        make = jobs.make_custom_job if job.hyperparameters is None else jobs.make_tuning_job
    return make(job, name=options.name, region=options.region, job_dir=options.job_dir, package=package)


def make_command(
    job: TrainingInput, options: argparse.Namespace, package: str, *, config: str, request: dict[str, Any]
) -> list[str]:
    """What gcloud is called with; writes the file that it reads.

    Args:
        job: what is sent.
        options: of `parse`.
        package: gs:// path of the sdist; '' where the job runs an image.
        config: path for that file.
        request: of `make_request`.
    """
    common = ['--region', options.region, *(['--project', options.project] if options.project else ()), '--format', 'json']
    if options.service == AI_PLATFORM:
        # gcloud sets these itself, from its flags.
        ours = ('args', 'region', 'jobDir', 'packageUris', 'pythonModule', 'enableWebAccess')
        training = {key: value for key, value in request['trainingInput'].items() if key not in ours}
        content: dict[str, Any] = {'trainingInput': training, 'labels': request.get('labels')}
        packages = ','.join(request['trainingInput'].get('packageUris', ()))
        folder = request['trainingInput']['jobDir']
        command = ['gcloud', 'ai-platform', 'jobs', 'submit', 'training', options.name, '--config', config, '--job-dir', folder]
        command += ['--packages', packages, '--module-name', training_input.MODULE] if package else []
        command += ['--enable-web-access'] if request['trainingInput']['enableWebAccess'] else []
        command += [*common, *(['--', *job.args] if job.args else ())]
    elif job.hyperparameters is None:
        content = request['jobSpec']
        labels = ','.join(f'{key}={value}' for key, value in job.labels.items())
        command = ['gcloud', 'ai', 'custom-jobs', 'create', '--display-name', options.name, '--config', config, *common]
        command += ['--labels', labels] if labels else []
        command += ['--kms-key', job.values['encryptionConfig']['kmsKeyName']] if 'encryptionSpec' in request else []
    else:
        content = request
        command = ['gcloud', 'ai', 'hp-tuning-jobs', 'create', '--display-name', options.name, '--config', config, *common]
    storage.write_atomic(config, yaml.safe_dump({key: value for key, value in content.items() if value}, sort_keys=False))
    return command


def _run_gcloud(command: Sequence[str]) -> str:
    """What gcloud prints.

    Raises:
        DataError: it failed, with its own reason.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((index for index, line in enumerate(lines) if line.startswith('ERROR')), -1)
        reason = ' '.join(lines[first:])[:500] if lines else 'it wrote nothing'
        raise DataError(f'{" ".join(command[:4])} failed: {reason}')
    return done.stdout


def _say_how_to_follow(options: argparse.Namespace, job: TrainingInput, answer: str) -> None:
    project = f' --project {shlex.quote(options.project)}' if options.project else ''
    folder = options.job_dir or job.values['jobDir']
    print(f'sent {options.name}')
    if options.service == AI_PLATFORM:
        print(f'  gcloud ai-platform jobs describe {options.name}{project}')
        print(f'  gcloud ai-platform jobs stream-logs {options.name}{project}')
    else:
        kind = 'custom-jobs' if job.hyperparameters is None else 'hp-tuning-jobs'
        identity = json.loads(answer).get('name', options.name) if answer.strip().startswith('{') else options.name
        print(f'  gcloud ai {kind} describe {identity}{project} --region {options.region}')
        if job.hyperparameters is None:
            print(f'  gcloud ai custom-jobs stream-logs {identity}{project} --region {options.region}')
        print(f'  {_CONSOLE}')
    print(f'  tensorboard --logdir {folder}')


if __name__ == '__main__':
    sys.exit(main())
