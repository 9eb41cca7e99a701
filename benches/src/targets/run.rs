//! Measures the rows and prints the results.

use testbed::programs::build_released;

use super::images::Room;
use super::load::{MeasuredFigures, fio_alone, served};
use super::rows::ROWS;
use super::{Figure, Options, Row, RowServer, Storage, Target, Threshold};
use crate::{in_turns, median};

/// Measures the selected rows.
pub fn run(options: &Options) -> Result<(), String> {
    let rows: Vec<&Row> = ROWS.iter().filter(|row| is_selected(row, &options.only)).collect();
    if rows.is_empty() {
        return Err(format!("no row begins with {}; --list shows them", options.only.join(" or ")));
    }
    if options.list {
        rows.iter().for_each(|row| println!("{:<18} {}", row.name, row.what));
        return Ok(());
    }
    build_released(&["tapline-disk", "tapline", "bench-client"])?;
    if !options.json {
        let (rounds, seconds) = (options.rounds, options.seconds);
        println!("{rounds} rounds of {seconds} s, medians; server on CPU 0, client on CPU 1; fio alone on CPU 1");
    }
    let mut report = Vec::new();
    for storage in [Storage::Memory, Storage::Disk] {
        let rows: Vec<&&Row> = rows.iter().filter(|row| row.storage == storage).collect();
        if rows.is_empty() {
            continue;
        }
        let room = Room::new(storage, options)?;
        for row in rows {
            report.push(measure(row, &room, options)?);
        }
    }
    if options.json {
        println!("{}", serde_json::Value::Array(report));
    }
    Ok(())
}

fn is_selected(row: &Row, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|name| row.name.starts_with(name.as_str()))
}

fn measure(row: &Row, room: &Room, options: &Options) -> Result<serde_json::Value, String> {
    let (who, missing): (Vec<_>, Vec<_>) = row.who.iter().partition(|(_, who)| missing(*who).is_none());
    let kind = |&&(name, who): &&(&'static str, RowServer)| {
        room.kind(name, who).map(|kind| kind.map(|kind| if row.load.cold { kind.cached() } else { kind }))
    };
    let kinds = who.iter().map(kind).collect::<Result<Vec<_>, String>>()?;
    let names: Vec<&str> = who.iter().map(|(name, _)| *name).collect();
    let samples = in_turns(row.name, &names, options.rounds, |which| {
        if row.load.fresh {
            room.renew()?;
        }
        match &kinds[which] {
            Some(kind) => served(&row.load, kind, room.place(), options.seconds),
            None => fio_alone(&row.load, room, options.seconds),
        }
    })?;
    let seen: Vec<MeasuredServer> =
        who.iter().zip(&samples).map(|((name, who), samples)| (*name, *who, middle(samples))).collect();
    if !options.json {
        print_row(row, &seen, &missing);
    }
    let servers = seen.iter().map(|(name, _, seen)| {
        serde_json::json!({
            "name": name, "iops": seen.iops, "p50_us": seen.p50, "server_cpu": seen.server_cpu,
            "waits_per_request": seen.waits, "client_cpu_us": seen.client_cpu,
        })
    });
    let targets = row.targets.iter().map(|target| {
        let judged = judged(target, &seen);
        let (has, is_met) = (judged.map(|(has, _)| has), judged.map(|(_, is_met)| is_met));
        serde_json::json!({ "target": in_words(target), "has": has, "met": is_met })
    });
    Ok(serde_json::json!({
        "row": row.name, "what": row.what, "servers": servers.collect::<Vec<_>>(),
        "targets": targets.collect::<Vec<_>>(),
    }))
}

/// A server of a row with its name and figures.
type MeasuredServer = (&'static str, RowServer, MeasuredFigures);

/// The program that is not installed, and its package.
fn missing(who: RowServer) -> Option<(&'static str, &'static str)> {
    let (program, package) = who.peer()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    (!is_there).then_some((program, package))
}

fn middle(samples: &[MeasuredFigures]) -> MeasuredFigures {
    let of = |column: fn(&MeasuredFigures) -> f64| median(samples.iter().map(column));
    MeasuredFigures {
        iops: of(|seen| seen.iops),
        p50: of(|seen| seen.p50),
        server_cpu: of(|seen| seen.server_cpu),
        waits: of(|seen| seen.waits),
        client_cpu: of(|seen| seen.client_cpu),
        hog_cpu: of(|seen| seen.hog_cpu),
    }
}

fn print_row(row: &Row, seen: &[MeasuredServer], without: &[&(&'static str, RowServer)]) {
    println!("\n{}: {}", row.name, row.what);
    println!(
        "  {:<20}{:>10} {:>9} {:>12} {:>11} {:>10} {:>10}",
        "", "IOPS", "p50 us", "server CPU", "IOPS/CPU s", "waits/IO", "client us"
    );
    for (name, who, seen) in seen {
        print!("  {name:<20}{:>10.0} {:>9.1}", seen.iops, seen.p50);
        match who {
            RowServer::Fio => println!(),
            _ => println!(
                " {:>12.2} {:>11.0} {:>10.3} {:>10.2}",
                seen.server_cpu,
                Figure::IopsPerCpu.of(seen),
                seen.waits,
                seen.client_cpu
            ),
        }
    }
    for (name, who) in without {
        if let Some((program, package)) = missing(*who) {
            println!("  {name:<20}{program} is not installed (package {package})");
        }
    }
    for target in row.targets {
        match judged(target, seen) {
            Some((has, is_met)) => {
                println!("  {}: {has:.2}, {}", in_words(target), if is_met { "met" } else { "MISSED" });
            }
            None => println!("  {}: not measured", in_words(target)),
        }
    }
}

/// The value of the target's figure or ratio, and whether it is sufficient. `None`: one of the two was not measured.
fn judged(target: &Target, seen: &[MeasuredServer]) -> Option<(f64, bool)> {
    let of = |name: &str| {
        let found = seen.iter().find(|(who, ..)| *who == name);
        found.map(|(.., seen)| target.figure.of(seen))
    };
    let own = of(target.of)?;
    Some(match target.wanted {
        Threshold::AtLeast(least, other) => {
            let ratio = own / of(other)?;
            (ratio, ratio >= least)
        }
        Threshold::AtMost(most, other) => {
            let ratio = own / of(other)?;
            (ratio, ratio <= most)
        }
        Threshold::No(most) => (own, own <= most),
    })
}

fn in_words(target: &Target) -> String {
    let figure = match target.figure {
        Figure::Iops => "IOPS",
        Figure::IopsPerCpu => "IOPS a CPU second",
        Figure::P50 => "p50",
        Figure::ServerCpu => "CPU of the server",
        Figure::Waits => "waits of the client a request",
        Figure::ClientCpu => "CPU microseconds of the client a request",
        Figure::HogCpu => "CPU of a process that wants all of it",
    };
    let of = target.of;
    match target.wanted {
        Threshold::AtLeast(least, other) => format!("{figure}, {of} at least {least} of {other}"),
        Threshold::AtMost(most, other) => format!("{figure}, {of} at most {most} of {other}"),
        Threshold::No(most) => format!("{figure}, {of} at most {most}"),
    }
}

impl Figure {
    fn of(self, seen: &MeasuredFigures) -> f64 {
        match self {
            Figure::Iops => seen.iops,
            Figure::IopsPerCpu => seen.iops / seen.server_cpu,
            Figure::P50 => seen.p50,
            Figure::ServerCpu => seen.server_cpu,
            Figure::Waits => seen.waits,
            Figure::ClientCpu => seen.client_cpu,
            Figure::HogCpu => seen.hog_cpu,
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_target_names_servers_of_its_row() {
        for row in ROWS {
            let is_there = |name: &str| row.who.iter().any(|(who, _)| *who == name);
            for target in row.targets {
                assert!(is_there(target.of), "{}: {target:?}", row.name);
                if let Threshold::AtLeast(_, other) | Threshold::AtMost(_, other) = target.wanted {
                    assert!(is_there(other), "{}: {target:?}", row.name);
                }
            }
        }
    }
}
