//! Private memory of the edge: idle, with sessions, and after they have ended.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Bench, only_with};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::role::Role;
use crate::table::{Bound, Row, Table, mib, short};

/// Selects the value of a row.
type SelectValue = fn(&MemoryUse) -> u64;

/// The memory of one proxy's edge side, in bytes.
#[derive(Debug)]
struct MemoryUse {
    name: &'static str,
    idle: u64,
    busy: u64,
    after: u64,
    /// Memory of the other process while the sessions are open.
    cloud_busy: u64,
    /// Time until the memory was freed, at most [`TIMEOUT`].
    back: Duration,
}

impl Bench {
    /// Measures with this number of sessions.
    pub(crate) fn memory(&self, count: usize, table: &mut Table) -> Result<()> {
        let stand = self.stand()?;
        let mut all = Vec::new();
        for proxy in stand.all() {
            all.push(weigh(proxy, count)?);
        }
        for one in &all {
            let [idle, busy, after, cloud] = [one.idle, one.busy, one.after, one.cloud_busy].map(mib);
            eprintln!(
                "{}: edge MiB idle {idle:.1}, with {count} {busy:.1}, {:.1?} after {after:.1}; server with {count} {cloud:.1}",
                one.name, one.back
            );
        }
        let tunnel = stand.tunnel.as_ref();
        let of = |name: &str, pick: SelectValue| {
            all.iter().find(|one| one.name == name).map_or(f64::NAN, |one| mib(pick(one)))
        };
        let busy = if count == 100 { Bound::Most(24.0, 20.0) } else { Bound::Most(48.0, 48.0) };
        let rows: [(String, SelectValue, Bound); 3] = [
            ("edge memory idle, MiB".into(), |one| one.idle, Bound::Most(10.0, 8.0)),
            (format!("edge memory with {count} sessions, MiB"), |one| one.busy, busy),
            (
                "edge memory above idle after they ended, MiB".into(),
                |one| one.after.saturating_sub(one.idle),
                Bound::Most(4.0, 4.0),
            ),
        ];
        for (figure, pick, bound) in rows {
            table.add(Row {
                figure,
                tunnel: format!("{} MiB", short(of("tunnel", pick))),
                reference: format!("relay {} MiB", short(of("relay", pick))),
                others: format!("ssh -R {} MiB", short(of("ssh -R", pick))),
                value: of("tunnel", pick),
                bound: only_with(tunnel, bound),
            });
        }
        Ok(())
    }
}

fn weigh(proxy: &Proxy, count: usize) -> Result<MemoryUse> {
    thread::sleep(IDLE);
    let idle = steady(proxy)?;
    let mut hold = Process::role(None, &Role::Hold { way: proxy.ways.echo.clone(), count })?;
    let _: usize = hold.read_output()?;
    let busy = steady(proxy)?;
    let cloud_busy = proxy.memory()?.first().copied().unwrap_or(0);
    hold.dismiss();
    let _: usize = hold.read_output()?;
    let since = Instant::now();
    let mut after = proxy.edge_memory()?;
    while after > idle + GIVEN_BACK && since.elapsed() < TIMEOUT {
        thread::sleep(Duration::from_millis(100));
        after = proxy.edge_memory()?;
    }
    Ok(MemoryUse { name: proxy.name, idle, busy, after, cloud_busy, back: since.elapsed() })
}

/// Returns the edge side's memory once it has not changed for half a second.
pub(super) fn steady(proxy: &Proxy) -> Result<u64> {
    let mut last = proxy.edge_memory()?;
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(500));
        let now = proxy.edge_memory()?;
        if now == last {
            break;
        }
        last = now;
    }
    Ok(last)
}

/// Time for one-off work after the start, and for a first ping. Only recurring work is measured.
const IDLE: Duration = Duration::from_secs(30);
/// Memory within this many bytes of idle counts as freed.
const GIVEN_BACK: u64 = 4 << 20;
/// Maximum time until memory is freed.
const TIMEOUT: Duration = Duration::from_secs(20);
