//! The target of all sessions: reads the plan from the first line, carries it out, and reports.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::ReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::soak::pattern::Pattern;
use crate::soak::plan::{Kind, Plan};
use crate::soak::pump::{End, Progress, Side, give, take, write};
use crate::soak::world::{HANG, World};

/// Listens until the runtime ends.
pub(crate) async fn listen(world: &Arc<World>) -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let at = listener.local_addr()?;
    let world = world.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(serve(client, world.clone()));
        }
    });
    Ok(at)
}

async fn serve(mut client: TcpStream, world: Arc<World>) -> Result<()> {
    client.set_nodelay(true)?;
    let Ok(line) = timeout(HANG, line(&mut client)).await else {
        world.fault("a target hung before the first line".to_owned());
        return Ok(());
    };
    // A client that could not open its session sends nothing here.
    let Ok(line) = line else { return Ok(()) };
    let plan: Plan = serde_json::from_slice(&line)?;
    let side = act(client, &plan, &world).await;
    world.report(plan.id, side);
    Ok(())
}

/// Carries out the target's part of the plan.
async fn act(mut client: TcpStream, plan: &Plan, world: &World) -> Side {
    let (mut read, mut write) = client.split();
    let (up, down) = (Pattern::up(plan.seed), Pattern::down(plan.seed));
    let pulse = &Progress::new(plan, world);
    let mut unsent = None;
    let (got, end) = match plan.kind {
        Kind::Upload | Kind::HalfClose => {
            let taken = take(&mut read, up, plan.up, pulse).await;
            if taken.1 == End::Finished {
                sleep(plan.pause).await;
                unsent = sent(&mut write, down, pulse).await.err();
            }
            taken
        }
        Kind::Echo => echo(&mut read, &mut write, up, pulse).await,
        Kind::TargetAborts => {
            unsent = give(&mut write, down, plan.down, pulse).await.err();
            // A close is abrupt only if there are unread bytes.
            let _ = pulse.within(read.peek(&mut [0])).await;
            (0, End::Own)
        }
        Kind::Download | Kind::Both | Kind::ClientAborts | Kind::Vanish => {
            let (taken, given) =
                tokio::join!(take(&mut read, up, plan.up, pulse), sent(&mut write, down, pulse));
            unsent = given.err();
            taken
        }
    };
    Side { got, end, unsent }
}

/// Sends the target's bytes, and their end.
async fn sent(
    write: &mut tokio::net::tcp::WriteHalf<'_>,
    down: Pattern,
    pulse: &Progress<'_>,
) -> Result<(), String> {
    give(write, down, pulse.plan.down, pulse).await?;
    write.shutdown().await.map_err(|why| why.to_string())
}

/// Echoes all bytes as they arrive.
async fn echo(
    read: &mut ReadHalf<'_>,
    back: &mut tokio::net::tcp::WriteHalf<'_>,
    up: Pattern,
    pulse: &Progress<'_>,
) -> (u64, End) {
    let mut buffer = [0; 4096];
    let mut got = 0;
    loop {
        let n = match pulse.within(read.read(&mut buffer)).await {
            None => return (got, End::Hung),
            Some(Err(why)) => return (got, End::Reset(why.to_string())),
            Some(Ok(n)) => n,
        };
        pulse.beats(n as u64);
        let came = buffer.get(..n).unwrap_or_default();
        if n == 0 {
            let _ = back.shutdown().await;
            return (got, End::Finished);
        }
        if let Some(fault) = up.fault(got, came) {
            return (got, End::Wrong(fault));
        }
        got += n as u64;
        if let Err(why) = write(back, came, pulse).await {
            return (got, End::Reset(why));
        }
    }
}

/// Reads the first line byte by byte, so that all following bytes stay in the kernel.
pub(crate) async fn line(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        match from.read_u8().await? {
            b'\n' => return Ok(line),
            byte => line.push(byte),
        }
    }
}
