//! The tables at the end of a run.

use std::fmt::Write;
use std::time::Duration;

use crate::soak::cluster::Cluster;
use crate::soak::faults::{FaultInjector, SURVIVORS};
use crate::soak::weigh::{ProcessSample, TASKS};
use crate::soak::world::World;
use crate::table::mib;

/// Returns the tables of sessions, refusals, faults and processes as Markdown.
pub(crate) fn all(
    cluster: &Cluster,
    world: &World,
    conductor: &FaultInjector,
    before: &[ProcessSample],
) -> String {
    let mut text = String::new();
    // Writing to a `String` cannot fail.
    let _ = write(&mut text, cluster, world, conductor, before);
    text
}

fn write(
    to: &mut String,
    cluster: &Cluster,
    world: &World,
    conductor: &FaultInjector,
    before: &[ProcessSample],
) -> std::fmt::Result {
    let book = world.book();
    writeln!(to, "| sessions | whole | died with one of their two processes |\n| --- | --- | --- |")?;
    for (kind, [whole, died]) in &book.sessions {
        writeln!(to, "| {kind:?} | {whole} | {died} |")?;
    }
    let [whole, died] = book.sessions.values().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    writeln!(to, "| all | {whole} | {died} |")?;
    writeln!(to, "\n| not opened | times |\n| --- | --- |")?;
    for (why, times) in &book.refused {
        writeln!(to, "| {why} | {times} |")?;
    }
    writeln!(to, "\n| fault | times |\n| --- | --- |")?;
    for (fault, times) in conductor.injected() {
        writeln!(to, "| {fault:?} | {times} |")?;
    }
    writeln!(to, "| all | {} |", conductor.injected().values().sum::<u64>())?;
    writeln!(
        to,
        "\n| process | starts | resumes | memory before, MiB | after | descriptors | after | threads | after | links | after | tasks | after |"
    )?;
    writeln!(to, "|{}", " --- |".repeat(13))?;
    for (number, (member, then)) in cluster.members.iter().zip(before).enumerate() {
        let Some(now) = &member.last else { continue };
        let name = if SURVIVORS.contains(&number) {
            format!("{}, survivor", member.name)
        } else {
            member.name.clone()
        };
        write!(to, "| {name} | {} | {} ", member.starts, member.resumed())?;
        write!(to, "| {:.1} | {:.1} ", mib(then.memory), mib(now.memory))?;
        write!(to, "| {} | {} ", then.descriptors, now.descriptors)?;
        write!(to, "| {} | {} ", then.threads, now.threads)?;
        write!(to, "| {} | {} ", then.links(), now.links())?;
        writeln!(to, "| {} | {} |", then.count(TASKS), now.count(TASKS))?;
    }
    writeln!(to)?;
    writeln!(to, "{} MiB checked on both sides together.", world.bytes() >> 20)?;
    writeln!(to, "{} interactive links.", cluster.interactive_links())?;
    let spans = [
        ("Longest stall of a session that continued", book.stall),
        ("Longest silence of a session after its line worked again", book.silence),
        ("Longest time that a target outlived its client", book.lag),
        ("Longest opening", book.opening),
        ("Longest refusal", book.refusing),
    ];
    for (what, (time, session)) in spans {
        writeln!(to, "{what}: {}, session {session}.", seconds(time))?;
    }
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
