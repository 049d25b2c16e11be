//! The README's first steps on a separate machine, as root and as an unprivileged user.

use std::os::unix::fs::PermissionsExt;

use crate::parts::{are_installed, cached_program, is_root};
use crate::process::{TIMEOUT, run};
use crate::tunnel::PROGRAM;

/// Shell functions for the scripts: `waits CONDITION`, `tunnel` and `serves`.
const HELPERS: &str = r#"set -e; ip link set lo up; PLACE=/run/place
mount -t tmpfs none /run; mkdir $PLACE; mount --bind $DIR $PLACE; cd $PLACE
for program in $PROGRAMS; do touch ${program##*/}; mount --bind $program ${program##*/}; done
mount -t tmpfs -o mode=1777 none /tmp
waits() { n=0; until eval "$1"; do n=$((n+1)); [ $n -lt 300 ] || { echo "not: $1"; cat *.log; exit 9; }; sleep 0.1; done; }
tunnel() { $AS $PLACE/tunnel "$@"; }
serves() { $AS $PLACE/tunnel $1 -c $2/$1.toml > $3.log 2>&1 & }
"#;

/// Runs a bash script in separate namespaces, in a directory that all users may write to. /run and /tmp are empty. All
/// users can start these programs, which are in the directory, wherever they are outside.
fn script(programs: &[&str], text: &str) {
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let alone = ["-m", "-n", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private"];
    let dir = place.path().display();
    let programs = programs.join(" ");
    let text = format!("DIR={dir} PROGRAMS='{programs}'\n{HELPERS}{text}\necho all is well\n");
    let output = run("unshare", &[&alone[..], &["bash", "-c", &text]].concat(), None, 6 * TIMEOUT);
    assert!(output.status.success() && output.stdout.ends_with("all is well\n"), "{output:?}");
}

/// /run/tunnel does not exist: root creates it, and other users have a directory of their own.
#[test]
fn a_server_set_up_by_init_invites_a_node_and_lists_it() {
    if !is_root() || !are_installed(&["unshare", "setpriv", "ip", "flock"]) {
        return;
    }
    script(
        &[PROGRAM],
        r#"nobody="setpriv --reuid=65534 --regid=65534 --clear-groups"
steps() { # user, directory of the sockets
    AS=$1; $AS mkdir $PLACE/$3; cd $PLACE/$3
    tunnel init files --name 127.0.0.1 --install-dir $PWD/etc > init.out
    $AS cp -rpT files/server etc
    serves server etc cloud; pod=$!
    waits "tunnel status | grep -qx 'no node is connected'"
    grep -q "admin socket open path=$2/server.sock" cloud.log
    ! grep -q ' WARN ' cloud.log || { cat cloud.log; exit 9; }
    tunnel invite --node node2 > invited.out
    grep -o 'i[^ ]*[.]node2' invited.out | $AS $PLACE/$(grep -o 'tunnel join .*' invited.out) --install-dir $PWD/joined > join.out
    serves edge joined edge; edge=$!
    waits "tunnel status | grep -q '^node2 '"
    tunnel status | grep -qx "queried $2/server.sock; others on this machine: --socket=$2/edge.sock"
    tunnel status --socket=$2/edge.sock | grep -q '^edge of node2 '
    tunnel invitations revoke node2 > revoked.out
    kill $pod $edge; wait $pod $edge
}
steps "$nobody" /tmp/tunnel-65534 lone
mkdir -p -m 755 /run/user; mkdir -m 700 /run/user/65534; chown 65534:65534 /run/user/65534
XDG_RUNTIME_DIR=/run/user/65534 steps "$nobody" /run/user/65534/tunnel session
steps "" /run/tunnel root
AS="$nobody"; cd $PLACE; ! tunnel status 2> refused.log; grep -q 'no admin socket of a server or edge' refused.log
mkdir -m 755 tokens; printf 'node3:%032d\n' 1 > tokens/token
for dir in /run/tunnel tokens; do $nobody flock $dir sleep 100 & done
waits '! flock -n /run/tunnel true && ! flock -n tokens true'
AS=; serves server root/etc cloud; waits "tunnel status > /dev/null 2>&1"
AS="$nobody"; ! tunnel status 2> refused.log; grep -q 'permission denied for /run/tunnel/server.sock' refused.log
AS=; tunnel token rotate node3 --file tokens/token > rotated.out"#,
    );
}

/// The edge knows its addresses; its DNS server stops responding before the server restarts.
#[test]
fn an_edge_links_again_while_dns_does_not_respond() {
    let Some(coredns) = cached_program("coredns-1.15.0/coredns")
        .filter(|_| is_root() && are_installed(&["unshare", "ip", "curl"]))
    else {
        return;
    };
    script(
        &[PROGRAM, coredns.to_str().unwrap()],
        r#"echo 'nameserver 127.0.0.1' > resolv.conf; mount --bind resolv.conf /etc/resolv.conf
echo '127.0.0.1 cloud.test' > zone
printf '.:53 {\n bind 127.0.0.1\n hosts zone {\n ttl 1\n }\n}\n' > Corefile
./coredns -conf Corefile > dns.log 2>&1 & dns=$!
tunnel init files --name cloud.test --node node1 --install-dir $PLACE/etc > init.out
cp -rpT files/server etc; cp -rpT files/edge-node1 node
sed -i 's#/etc/\(certs\|token\)#/node/\1#; s/^.edge.uplink.$/&\nadmin_listen = "127.0.0.1:9011"/' node/edge.toml
serves server etc cloud; pod=$!; serves edge node edge
waits 'curl -s http://127.0.0.1:9010/cloud/healthz | grep -q node1'
kill -STOP $dns; kill -9 $pod; wait $pod || true
waits 'grep -q "DNS gave no address" edge.log'
serves server etc cloud-again
waits 'curl -s http://127.0.0.1:9010/cloud/healthz | grep -q node1'"#,
    );
}
