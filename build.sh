#!/usr/bin/env bash
# Make build/, an environment with the patched torch. All logic is in src/graft/bootstrap.py.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

# The Python that --python names runs this too, so a machine needs no other.
asked=
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        --python) next=$((i + 1)); asked=${!next-} ;;
        --python=*) asked=${!i#--python=} ;;
    esac
done

python=
for each in ${asked:+"$asked"} python3 python3.14 python3.13 python3.12 python3.11; do
    if fits "$each"; then
        python=$each
        break
    fi
done
if [[ -z $python ]]; then
    found=$(python3 -V 2>&1 || true)
    echo "error: ./build.sh needs Python 3.11 to 3.14; python3 here is: ${found:-missing}" >&2
    echo "next: ./build.sh --python PY, with the path of such a Python" >&2
    exit 1
fi

PYTHONPATH=$root/src PYTHONDONTWRITEBYTECODE=1 exec "$python" -P -m graft.bootstrap "$@"
