use sim::{explore::*, media::Unwritten, planted::*, subject::*};
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let subs = subjects(Kind::of_format("vhd").unwrap());
    let t = Instant::now();
    match args[1].as_str() {
        "ex" => {
            for s in &subs {
                let t = Instant::now();
                let o = exhaustive(&[*s], Bound::of_ops(args[2].parse().unwrap()), None, 2, &|_, _| true);
                println!("{s:?} {:?} {:?}", o.counts, t.elapsed());
                if let Some(f) = o.failure {
                    println!("FAIL {f}\n  {}", f.case);
                }
            }
        }
        "rand" => {
            let mut seed: u64 = args[2].parse().unwrap();
            let n: u64 = args[3].parse().unwrap();
            let end = seed + n;
            let ops = args[4].parse().unwrap();
            while seed < end {
                let o = random(&subs, seed..end, ops, 2, &|_, _| true);
                println!("{:?}", o.counts);
                if let Some(f) = o.failure {
                    let f = sim::shrink::shrink(f);
                    println!("FAIL {f}\n  {}", f.case);
                    break;
                }
                seed = end;
            }
        }
        "faults" => {
            for s in &subs {
                let o = every_fault(&[*s], 2, &|_, _| true);
                println!("{s:?} {:?}", o.counts);
                if let Some(f) = o.failure {
                    println!("FAIL {f}\n  {}", f.case);
                }
            }
        }
        "planted" => {
            for bug in Planted::all() {
                let t = Instant::now();
                let o = hunt(bug, &subs, 200_000);
                println!(
                    "{bug:20} {:?} states {} runs {:?}",
                    o.failure.as_ref().map(|f| f.violation.to_string().chars().take(110).collect::<String>()),
                    o.counts.states,
                    t.elapsed()
                );
            }
        }
        "exb" => {
            for s in &subs {
                let o = exhaustive(
                    &[*s],
                    Bound::of_ops(args[3].parse().unwrap()),
                    Some(args[2].parse().unwrap()),
                    2,
                    &|_, _| true,
                );
                println!("{s:?} {:?} {:?}", o.counts, t.elapsed());
                if let Some(f) = o.failure {
                    println!("FAIL {f}\n  {}", f.case);
                }
            }
        }
        _ => {}
    }
    println!("{:?}", t.elapsed());
    let _ = Unwritten::Stale;
}
