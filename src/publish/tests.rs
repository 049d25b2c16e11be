use tunnel_net::resolver::Resolver;

use crate::publish::hosts::Hosts;

use super::*;

fn follow(wanted: &mut DesiredRecords, here: &[&str], now: Instant) -> Vec<String> {
    wanted.follow(here.iter().map(|name| (*name).to_owned()), now);
    wanted.records().into_iter().collect()
}

#[tokio::test(start_paused = true)]
async fn a_record_comes_at_once_and_goes_two_seconds_after_its_node() {
    let mut wanted = DesiredRecords::default();
    let start = Instant::now();
    let at = |millis| start + Duration::from_millis(millis);
    assert_eq!(follow(&mut wanted, &["a", "b"], at(0)), ["a", "b"]);
    assert_eq!(wanted.next(), None);
    assert_eq!(follow(&mut wanted, &["b"], at(1000)), ["a", "b"]);
    assert_eq!(wanted.next(), Some(at(3000)));
    assert_eq!(follow(&mut wanted, &[], at(2000)), ["a", "b"]);
    assert_eq!(wanted.next(), Some(at(3000)), "each record has its own time");
    assert_eq!(follow(&mut wanted, &["b"], at(2999)), ["a", "b"]);
    assert_eq!(follow(&mut wanted, &["b"], at(3000)), ["b"]);
    assert_eq!(wanted.next(), None, "a node that came back keeps its record");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_told_and_tried_again_with_growing_pauses() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Metrics::edge();
    let (told, mut telling) = tokio::sync::mpsc::channel(1000);
    let file = dir.path().join("later/hosts");
    let publisher = Publisher {
        registry: Registry::new(metrics.clone()),
        store: Box::new(Hosts::new(file.clone(), IpAddr::from([10, 0, 0, 1]))),
        zone: Arc::new(Zone::new(String::new(), Vec::new(), |_| false)),
        vet: RecordPolicy::new(Resolver::system().unwrap(), |_| Box::pin(std::future::ready(true))),
        metrics: metrics.clone(),
        report: Box::new(move |state| drop(told.try_send(state))),
    };
    let drain = Drain::new();
    drain.spawn(tracing::Span::none(), publisher.run(drain.clone()));
    for failures in 1..=8 {
        assert!(telling.recv().await.unwrap().is_err());
        assert_eq!(metrics.dns_publish_failures.get(), failures);
    }
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    while telling.recv().await.unwrap().is_err() {}
    assert!(file.exists());
    drain.finish(Duration::from_secs(5), std::future::pending()).await;
}

#[tokio::test(start_paused = true)]
async fn changes_that_come_close_together_are_gathered() {
    let (tell, mut changes) = watch::channel(());
    let pause = Duration::from_millis(200);
    let started = Instant::now();
    let gathering = tokio::join!(gathered(&mut changes, pause), async {
        sleep(Duration::from_secs(1)).await;
        tell.send_replace(());
        sleep(pause / 2).await;
        tell.send_replace(());
    });
    let ((), ()) = gathering;
    assert_eq!(started.elapsed(), Duration::from_secs(1) + pause, "the next change does not delay the first");
}
