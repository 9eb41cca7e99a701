//! Tests of Little's law and of the bars.

use super::*;

/// A histogram of `count` requests of `ns` nanoseconds each.
fn histogram(count: u64, ns: u64) -> Histogram {
    let bucket = (0..stats::BUCKETS).find(|bucket| bucket_bounds(*bucket).1 > ns).unwrap();
    Histogram::of([(bucket, count)])
}

fn little(queue: f64, per_second: f64, histogram: &Histogram) -> (f64, bool) {
    let stage = StageRow {
        name: "storage",
        ended: 0.0,
        sum: 0.0,
        histogram: Some(histogram.clone()),
        longest: None,
        queue: Some((queue, per_second)),
    };
    stage.little().unwrap()
}

#[test]
fn a_queue_that_differs_by_five_percent_from_rate_times_latency_is_marked() {
    // 1,000 requests per second of 2 ms each make a queue of two.
    let histogram = histogram(1000, 2_000_000);
    let (product, differs) = little(2.0, 1000.0, &histogram);
    assert!((product - 2.0).abs() < 0.002 && !differs, "{product}");
    for (queue, is_marked) in [(1.92, false), (2.08, false), (1.85, true), (2.15, true), (3.0, true)] {
        assert_eq!(little(queue, 1000.0, &histogram).1, is_marked, "{queue}");
    }
    let stuck = little(1.0, 0.0, &Histogram::default());
    assert_eq!(stuck, (0.0, true), "nothing ends, and one is there");
    assert_eq!(little(0.004, 0.0, &Histogram::default()), (0.0, false), "too little to tell");
}

#[test]
fn requests_that_spent_no_time_in_a_stage_count_as_zeroes() {
    // One in ten of 1,000 requests per second took 10 ms: a queue of one.
    let counted = histogram(1, 10_000_000);
    let all = with_zeroes(&counted, 10.0, true);
    assert_eq!((all.count(), all.quantile(0.5), all.quantile(0.9)), (10, Some(0), Some(0)));
    assert!(all.quantile(0.99).unwrap() > 9_900_000);
    let (product, differs) = little(1.0, 1000.0, &all);
    assert!((product - 1.0).abs() < 0.002 && !differs, "{product}");
    assert!(little(1.0, 1000.0, &counted).1, "without them it would differ");
    assert_eq!(with_zeroes(&counted, 10.0, false), counted, "others are missing as well");
    assert_eq!(with_zeroes(&counted, 0.0, true), counted);
}

#[test]
fn bars_are_as_high_as_their_share_of_the_highest() {
    assert_eq!(sparkline(&[0.0, 1.0, 4.0, 8.0], 8.0), "▁▁▄█");
    assert_eq!(sparkline(&[0.0, 0.0], 0.0), "▁▁");
    assert_eq!(sparkline(&[], 0.0), "");
}
