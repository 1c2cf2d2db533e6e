#!/usr/bin/env bash
# Three calls that show whether a write is safe to retry: a first attempt that is cut off, the
# retry with the same key, the same key with an edited body.
#
#   docs/smoke.sh BASE_URL TOKEN [PATH]
#
#   docs/smoke.sh http://127.0.0.1:8080 acme
#   docs/smoke.sh https://staging.example.com "$TOKEN" /v1/orders
#
# BASE_URL  where the service is, without the path
# TOKEN     sent as `Authorization: Bearer TOKEN`
# PATH      what to POST to, with its query; by default `/charges?delay_ms=2000`, which is right
#           for the example service of this repository (docs/examples/payments.rs, `serve`)
#
# It makes one real write each time, under a new random key. From the environment:
#
# BODY, EDITED    the two JSON bodies; by default two amounts of one charge
# CUT             seconds after which the first attempt is cut off (1): more than it takes to
#                 connect, less than the write takes; a write that is faster is not cut off, then
#                 only its replay is tested
# REPLAY_HEADER   the header line that marks a replay (Idempotent-Replayed)
#
# Exit status: 0 every promise kept, 1 a promise broken, 2 the calls could not be made.
# Needs bash and curl.
set -u

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: ${0##*/} BASE_URL TOKEN [PATH]" >&2
    exit 2
fi
if ! command -v curl >/dev/null; then
    echo "${0##*/}: needs curl" >&2
    exit 2
fi

path=${3-"/charges?delay_ms=2000"}
url=${1%/}/${path#/}
token=${2//\\/\\\\}
token=${token//\"/\\\"} # as curl reads it from its configuration, out of sight of `ps`
body=${BODY-'{"amount_cents":1999,"currency":"usd","source":"pm_card"}'}
edited=${EDITED-'{"amount_cents":2999,"currency":"usd","source":"pm_card"}'}
cut=${CUT-1}
replay_header=${REPLAY_HEADER-Idempotent-Replayed}
key=smoke-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')

if [ "$body" = "$edited" ]; then
    echo "${0##*/}: BODY and EDITED must differ" >&2
    exit 2
fi
dir=$(mktemp -d) || exit 2
trap 'rm -rf "$dir"' EXIT
trap 'exit 2' INT TERM HUP

broken=0

# call NAME BODY SECONDS: one POST. Leaves NAME.head and NAME.body in $dir, curl's exit status in
# $failed, the HTTP status in $status (000 without an answer), in $sent whether it was sent.
call() {
    printf '  > POST %s\n  > Idempotency-Key: "%s"\n  > %s\n' "$url" "$key" "$2"
    report=$(printf 'header = "Authorization: Bearer %s"\n' "$token" |
        curl --config - --silent --show-error --max-time "$3" \
            --request POST --header "Idempotency-Key: \"$key\"" \
            --header 'Content-Type: application/json' --header 'Expect:' --data-binary "$2" \
            --dump-header "$dir/$1.head" --output "$dir/$1.body" --write-out '%{http_code} %{time_pretransfer}' \
            "$url" 2>"$dir/$1.error")
    failed=$?
    status=${report%% *}
    status=${status:-000}
    case ${report#* } in *[1-9]*) sent=yes ;; *) sent=no ;; esac
    touch "$dir/$1.head" "$dir/$1.body"
    if [ "$failed" -ne 0 ]; then
        printf '  x %s\n' "$(head -n 1 "$dir/$1.error")"
        return
    fi
    tr -d '\r' <"$dir/$1.head" |
        grep -iE "^(HTTP/|Location:|Retry-After:|$replay_header:)" | sed 's/^/  < /'
    head -c 400 "$dir/$1.body" | sed 's/^/  < /'
    echo
}

# header NAME LINE: the value of a header line of an answer.
header() {
    tr -d '\r' <"$dir/$1.head" | grep -i "^$2:" | tail -n 1 | sed 's/^[^:]*: *//'
}

pass() { printf '  PASS  %s\n' "$1"; }
note() { printf '  note  %s\n' "$1"; }
fail() {
    printf '  FAIL  %s\n' "$1"
    broken=$((broken + 1))
}
give_up() {
    printf '\n%s\n' "$1" >&2
    exit 2
}

# The retry: the same key and body until the answer is final. `409` with `Retry-After` says that
# the first attempt still runs; a client that obeys it comes back.
retry() {
    local wait tries=0
    while :; do
        call "$1" "$body" 60
        tries=$((tries + 1))
        wait=$(header "$1" Retry-After)
        case $wait in '' | *[!0-9]*) return ;; esac
        case $status in 409 | 429 | 503) ;; *) return ;; esac
        [ "$tries" -lt 20 ] || return
        note "told to come back in $wait s"
        sleep "$wait"
    done
}

echo "1. The first attempt, cut off after $cut s"
call first "$body" "$cut"
first=$status
case $failed:$first in
0:2??) note "answered before the cut: nothing was lost, the retry must replay this answer" ;;
28:*)
    [ "$sent" = yes ] || give_up "Cut off before the request was sent: give CUT more seconds."
    note "cut off: the client does not know whether the write was done"
    ;;
0:*) give_up "The first attempt was refused with $first: check TOKEN, PATH and BODY." ;;
*) give_up "No answer from $url: is the service running?" ;;
esac
first_failed=$failed

echo
echo "2. The retry: same key, same body"
retry retry
case $failed:$status in
0:2??) pass "an answer ($status)" ;;
*) fail "no success but $status: the answer says why" ;;
esac
if [ "$(header retry "$replay_header")" = true ]; then
    pass "marked $replay_header: true, so the write did not run again"
else
    fail "not marked $replay_header: true, so the write may have run again"
fi
if [ "$first_failed" -eq 0 ]; then
    if [ "$first" = "$status" ] && cmp -s "$dir/first.body" "$dir/retry.body"; then
        pass "the same status and bytes as the first answer"
    else
        fail "another answer than the first ($first)"
    fi
else # the first answer is not known: a second replay must equal this one
    again=$status
    retry again
    if [ "$again" = "$status" ] && cmp -s "$dir/retry.body" "$dir/again.body"; then
        pass "the same status and bytes each time"
    else
        fail "another answer each time"
    fi
fi

echo
echo "3. The same key with an edited body"
call edited "$edited" 60
if [ "$failed:$status" = 0:422 ]; then
    pass "refused (422)"
else
    fail "not refused with 422: $status"
fi

echo
if [ "$broken" -eq 0 ]; then
    echo "PASS: this write is safe to retry."
else
    echo "FAIL: $broken promises broken."
    exit 1
fi
