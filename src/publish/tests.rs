use std::net::IpAddr;

use tunnel_net::resolver::Resolver;

use crate::publish::hosts::Hosts;

use super::*;

fn follow(desired: &mut DesiredRecords, here: &[&str], now: Instant) -> Vec<String> {
    desired.follow(here.iter().map(|name| (*name).to_owned()), now);
    desired.records().into_iter().collect()
}

#[tokio::test(start_paused = true)]
async fn a_record_is_added_at_once_and_removed_two_seconds_after_its_node() {
    let mut desired = DesiredRecords::default();
    let start = Instant::now();
    let at = |millis| start + Duration::from_millis(millis);
    assert_eq!(follow(&mut desired, &["a", "b"], at(0)), ["a", "b"]);
    assert_eq!(desired.next(), None);
    assert_eq!(follow(&mut desired, &["b"], at(1000)), ["a", "b"]);
    assert_eq!(desired.next(), Some(at(3000)));
    assert_eq!(follow(&mut desired, &[], at(2000)), ["a", "b"]);
    assert_eq!(desired.next(), Some(at(3000)), "each record has its own time");
    assert_eq!(follow(&mut desired, &["b"], at(2999)), ["a", "b"]);
    assert_eq!(follow(&mut desired, &["b"], at(3000)), ["b"]);
    assert_eq!(desired.next(), None, "a node that came back keeps its record");
}

#[tokio::test(start_paused = true)]
async fn a_failing_store_is_reported_and_retried_with_backoff() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Metrics::edge();
    let (reports, mut states) = tokio::sync::mpsc::channel(1000);
    let file = dir.path().join("later/hosts");
    let publisher = Publisher {
        registry: Registry::new(metrics.clone()),
        store: Box::new(Hosts::new(file.clone(), IpAddr::from([10, 0, 0, 1]))),
        zone: Arc::new(NodeZone::new(String::new(), Vec::new(), |_| false)),
        vet: RecordFilter::new(Resolver::system(), |_| Box::pin(std::future::ready(true)), None),
        metrics: metrics.clone(),
        report: Box::new(move |state| drop(reports.try_send(state))),
    };
    let drain = Drain::new();
    drain.spawn(tracing::Span::none(), publisher.run(drain.clone()));
    for failures in 1..=8 {
        assert!(states.recv().await.unwrap().is_err());
        assert_eq!(metrics.dns_publish_failures.get(), failures);
    }
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    while states.recv().await.unwrap().is_err() {}
    assert!(file.exists());
    drain.finish(Duration::from_secs(5), std::future::pending()).await;
}

#[tokio::test(start_paused = true)]
async fn changes_in_close_succession_are_batched() {
    let (tell, mut changes) = watch::channel(());
    let pause = Duration::from_millis(200);
    let started = Instant::now();
    let gathering = tokio::join!(debounce(&mut changes, pause), async {
        sleep(Duration::from_secs(1)).await;
        tell.send_replace(());
        sleep(pause / 2).await;
        tell.send_replace(());
    });
    let ((), ()) = gathering;
    assert_eq!(started.elapsed(), Duration::from_secs(1) + pause, "the next change does not delay the first");
}
