//! `backup list` and `backup show`.

use arguments::backup::{BackupList, BackupOne};
use backup::{Id, Reader, Record};
use control::printable;
use control::size::readable;
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::output::{print, print_json, time};
use crate::target::{self, find};

/// Prints all backups of a target, or those of one disk.
pub fn list(list: &BackupList) -> Result<Exit, Failure> {
    let mut backups = target::open(&list.at)?.target.backups()?;
    if let Some(name) = &list.name {
        backups.retain(|record| &record.label == name);
    }
    if let Some(disk) = list.disk.as_deref().map(Id::of_name) {
        backups.retain(|record| record.disk == disk);
    }
    if list.at.json {
        print_json(&backups.iter().map(fields).collect::<Vec<_>>())?;
    } else {
        print(&table(&backups))?;
    }
    Ok(Exit::Done)
}

/// Lines of a list, under a head; nothing for an empty one.
pub fn table(backups: &[Record]) -> String {
    if backups.is_empty() {
        return String::new();
    }
    let line = |record: &Record| {
        let (id, time, size) = (record.id, time(record.time), readable(record.len));
        format!("{id}  {time:<20}  {size:>9}  {}\n", printable(&record.label))
    };
    let head = format!("{:<32}  {:<20}  {:>9}  NAME\n", "ID", "TIME", "SIZE");
    std::iter::once(head).chain(backups.iter().map(line)).collect()
}

/// What the JSON of any command says about a backup.
pub fn fields(record: &Record) -> serde_json::Value {
    json!({
        "id": record.id,
        "name": record.label,
        "disk": record.disk,
        "time": time(record.time),
        "size": record.len,
        "content": record.content,
        "since": record.base,
        "moment": record.moment,
    })
}

/// Prints one backup, with what it cost.
pub fn show(one: &BackupOne) -> Result<Exit, Failure> {
    let target = target::open(&one.at)?.target;
    let record = find(&target.backups()?, &one.id)?;
    let (cost, properties) = target.details(record.id)?;
    if one.at.json {
        let mut shown = fields(&record);
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("statistics".to_owned(), json!(cost));
            // What an incremental backup has not read is in its index only.
            let data = match record.base {
                None => record.len.saturating_sub(cost.holes),
                Some(_) => Reader::open(&target, record.id, 0)?.data()?,
            };
            shown.insert("data".to_owned(), json!(data));
            let properties = properties.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok());
            shown.extend(properties.map(|properties| ("properties".to_owned(), properties)));
        }
        print_json(&shown)?;
        return Ok(Exit::Done);
    }
    let since = record.base.map_or_else(|| "none: all of the disk was read".to_owned(), |base| base.to_string());
    let machine = record.moment.map_or_else(
        || "none: the disk alone".to_owned(),
        |moment| format!("one of its {} disks at moment {}", moment.disks, moment.id),
    );
    print(&format!(
        "id            {}\nname          {}\ntime          {}\nsize          {}\ncontent       {}\nsince         {since}\n\
         machine       {machine}\nread          {}\nholes         {}\nunchanged     {}\ndeduplicated  {}\nsent          {}\n",
        record.id,
        printable(&record.label),
        time(record.time),
        readable(record.len),
        record.content,
        readable(cost.read),
        readable(cost.holes),
        readable(cost.unchanged),
        readable(cost.deduplicated),
        readable(cost.sent),
    ))?;
    Ok(Exit::Done)
}
