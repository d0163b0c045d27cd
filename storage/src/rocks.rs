//! [`Store`] on RocksDB.
//!
//! One write-ahead log orders the writes of all families, so a synced write makes the earlier ones durable
//! too. Values of 4 KiB and more in the bulk families go to blob files: compaction moves their addresses, not
//! them. RocksDB's write group lets concurrent synced writes share one `fsync`.

use crate::disk;
use crate::error::StoreError;
use crate::schema::{FORMAT_KEY, FORMAT_VERSION};
use crate::store::{Batch, Durability, Family, KeyValue, Op, Store};
use rocksdb::{
    BlockBasedOptions, BottommostLevelCompaction, Cache, ColumnFamily, ColumnFamilyDescriptor, CompactOptions, DB,
    DBCompressionType, DBRecoveryMode, ErrorKind, FlushOptions, LogLevel, Options, ReadOptions, WriteBatch,
    WriteOptions,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Values from this length on go to blob files.
const BLOB_LEN_BYTES_MIN: u64 = 4 << 10;
/// Rollouts from this length on: nearly all. Compressing them again with every compaction took an eighth of the time in which
/// they came.
const ROLLOUT_BLOB_LEN_BYTES_MIN: u64 = 512;
/// Blob file length: small enough that collecting garbage in one needs little spare disk.
const BLOB_FILE_BYTES: u64 = 64 << 20;

/// Share of the blob files, oldest first, from which a compaction moves the values that it meets, whether or not any garbage
/// is in them: 0.5 wrote half of all weights a second time. Garbage is collected by [`Store::reclaim`] alone.
const BLOB_GC_AGE_CUTOFF: &str = "0.0";
/// Share of a write buffer that says which keys it has: 80 KiB of 4 MiB, 12 bits for each of 50,000 index rows.
const MEMTABLE_BLOOM_SHARE: f64 = 0.02;
/// How long a measured size is good for: listing the directory of a large store takes a millisecond.
const MEASURED_FOR: Duration = Duration::from_secs(1);

/// How much memory and disk a store may use. The defaults fit several nodes on one laptop: about
/// `cache_bytes + write_buffers_bytes` plus a few MiB, and the disk space of `wal_bytes_max` beside the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RocksOptions {
    /// Block cache with index and filter blocks, for all families together. Default 16 MiB; raise it when a
    /// node lists many rollouts.
    pub cache_bytes: usize,
    /// Write buffer of one family. Default 4 MiB; larger ones mean fewer, larger files.
    pub write_buffer_bytes: usize,
    /// Write buffers of all families together. Default 24 MiB; one batch may exceed it by its own length.
    pub write_buffers_bytes: usize,
    /// Longest write-ahead log: what is read again after a crash. Default 64 MiB, about a second.
    pub wal_bytes_max: u64,
    /// Open files. Default 128, each also costs some KiB of memory.
    pub open_files_max: i32,
    /// Free disk space below which bulk data is refused; below a quarter of it every put is, so that the log
    /// itself never meets a full disk, from which RocksDB may only recover by a restart. Deletes always pass.
    /// Default 128 MiB: a quarter of it exceeds the write buffers, which must still become files.
    pub disk_reserve_bytes: u64,
    /// Most bytes that the store may take up on disk, logs included; bulk data beyond is refused. Votes, log and
    /// consumed set go on. Default: no limit but the disk. The size is measured once a second, so it may be passed by
    /// what is written in one.
    pub quota_bytes: Option<u64>,
}

impl Default for RocksOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 16 * MIB,
            write_buffer_bytes: 4 * MIB,
            write_buffers_bytes: 24 * MIB,
            wal_bytes_max: 64 << 20,
            open_files_max: 128,
            disk_reserve_bytes: 128 << 20,
            quota_bytes: None,
        }
    }
}

/// A store in a directory. One handle and one process at a time may have it open for writing.
pub struct RocksStore {
    db: DB,
    path: PathBuf,
    read_only: bool,
    disk_reserve_bytes: u64,
    quota_bytes: Option<u64>,
    used: Mutex<Used>,
}

/// What the store took up when it was last measured, and what was put since.
#[derive(Debug, Default)]
struct Used {
    bytes: u64,
    measured: Option<Instant>,
}

impl fmt::Debug for RocksStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RocksStore").field("path", &self.path).field("read_only", &self.read_only).finish()
    }
}

impl RocksStore {
    /// Opens the store in `path`, which is created if it is not there, and replays its log.
    ///
    /// # Errors
    /// [`StoreError::Locked`], [`StoreError::Format`], [`StoreError::UnknownFamily`], [`StoreError::Damaged`] or
    /// [`StoreError::Io`]; the store is as it was.
    pub fn open(path: impl AsRef<Path>, options: &RocksOptions) -> Result<Self, StoreError> {
        let path = path.as_ref().to_path_buf();
        std::fs::create_dir_all(&path).map_err(|source| StoreError::Io {
            operation: "create the directory of the store",
            path: path.clone(),
            source,
        })?;
        check_families(&path)?;
        let db = DB::open_cf_descriptors(&db_options(options), &path, descriptors(options))
            .map_err(|e| open_error(&path, e))?;
        let store = Self {
            db,
            path,
            read_only: false,
            disk_reserve_bytes: options.disk_reserve_bytes,
            quota_bytes: options.quota_bytes,
            used: Mutex::default(),
        };
        store.check_or_write_format()?;
        tracing::debug!(path = %store.path.display(), "store opened");
        Ok(store)
    }

    /// Opens an existing store to look at it, without a lock and without changing a byte: for the store of a
    /// node that is dead. Of a live node it shows the moment of opening, and may fail later when that node
    /// removes a file.
    ///
    /// # Errors
    /// [`StoreError::Missing`] when there is no store; else as [`RocksStore::open`].
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref().to_path_buf();
        if !check_families(&path)? {
            return Err(StoreError::Missing { path });
        }
        let options = RocksOptions::default();
        let mut db_options = db_options(&options);
        db_options.create_if_missing(false);
        db_options.create_missing_column_families(false);
        let db = DB::open_cf_descriptors_read_only(&db_options, &path, descriptors(&options), false)
            .map_err(|e| open_error(&path, e))?;
        let store =
            Self { db, path, read_only: true, disk_reserve_bytes: 0, quota_bytes: None, used: Mutex::default() };
        store.check_or_write_format()?;
        Ok(store)
    }

    /// The store's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_or_write_format(&self) -> Result<(), StoreError> {
        let format = |got| StoreError::Format { path: self.path.clone(), expected: FORMAT_VERSION, got };
        match self.get(Family::Meta, FORMAT_KEY)? {
            Some(bytes) => {
                let got = <[u8; 4]>::try_from(bytes.as_slice()).map(u32::from_be_bytes).unwrap_or(0);
                if got == FORMAT_VERSION { Ok(()) } else { Err(format(got)) }
            }
            None => {
                // The version is the first thing written, so without it there is nothing else.
                for family in Family::ALL {
                    if !self.scan(family, &[], None, 1)?.is_empty() {
                        return Err(format(0));
                    }
                }
                if self.read_only {
                    return Ok(());
                }
                let mut batch = Batch::new();
                batch.put(Family::Meta, FORMAT_KEY, FORMAT_VERSION.to_be_bytes());
                self.write(batch, Durability::Synced)
            }
        }
    }

    fn family(&self, family: Family) -> &ColumnFamily {
        #[expect(clippy::expect_used, reason = "open creates every family and nothing drops one")]
        self.db.cf_handle(family.name()).expect("all families are open")
    }

    fn read_error(&self, operation: &'static str, family: Family, key: &[u8], e: rocksdb::Error) -> StoreError {
        if e.kind() == ErrorKind::Corruption {
            return StoreError::corrupt(family, key, e.into_string());
        }
        StoreError::Database { operation, path: self.path.clone(), source: e }
    }

    fn write_error(&self, operation: &'static str, e: rocksdb::Error) -> StoreError {
        if is_no_space(&e) {
            return StoreError::DiskFull {
                path: self.path.clone(),
                free_bytes: disk::free_bytes(&self.path).unwrap_or(0),
                reserve_bytes: self.disk_reserve_bytes,
            };
        }
        if e.to_string().contains("Writer has previous error") {
            return StoreError::NeedsReopen { path: self.path.clone(), source: e };
        }
        StoreError::Database { operation, path: self.path.clone(), source: e }
    }

    /// Refuses what would eat into the reserve. A `statvfs` costs a microsecond, a sync a thousand.
    fn check_disk(&self, batch: &Batch) -> Result<(), StoreError> {
        let put_bytes = batch.put_bytes();
        if put_bytes == 0 {
            return Ok(());
        }
        let free_bytes = disk::free_bytes(&self.path).map_err(|source| StoreError::Io {
            operation: "ask for the free space of",
            path: self.path.clone(),
            source,
        })?;
        let reserve_bytes = if batch.puts_bulk() { self.disk_reserve_bytes } else { self.disk_reserve_bytes / 4 };
        // Twice: once in the log, once in a file.
        if free_bytes.saturating_sub(2 * put_bytes) < reserve_bytes {
            return Err(StoreError::DiskFull { path: self.path.clone(), free_bytes, reserve_bytes });
        }
        if let Some(quota_bytes) = self.quota_bytes.filter(|_| batch.puts_bulk()) {
            let used_bytes = self.used_bytes()?;
            if used_bytes + put_bytes > quota_bytes {
                return Err(StoreError::QuotaReached { path: self.path.clone(), used_bytes, quota_bytes });
            }
            self.used.lock().unwrap_or_else(PoisonError::into_inner).bytes += put_bytes;
        }
        Ok(())
    }

    fn write_with(&self, batch: Batch, write_options: &WriteOptions) -> Result<(), StoreError> {
        self.check_disk(&batch)?;
        let mut rocks_batch = WriteBatch::default();
        for op in batch.ops() {
            match op {
                Op::Put(family, key, value) => rocks_batch.put_cf(self.family(*family), key, value),
                Op::Delete(family, key) => rocks_batch.delete_cf(self.family(*family), key),
                Op::DeleteRange(family, from, to) => rocks_batch.delete_range_cf(self.family(*family), from, to),
            }
        }
        drop(batch);
        self.db.write_opt(rocks_batch, write_options).map_err(|e| self.write_error("write", e))
    }

    /// What the store takes up, at most [`MEASURED_FOR`] old.
    fn used_bytes(&self) -> Result<u64, StoreError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.measured.is_none_or(|at| at.elapsed() > MEASURED_FOR) {
            *used = Used { bytes: self.size_bytes()?, measured: Some(Instant::now()) };
        }
        Ok(used.bytes)
    }
}

/// Whether there is a store at `path`, all of whose families are known.
fn check_families(path: &Path) -> Result<bool, StoreError> {
    if !path.join("CURRENT").exists() {
        return Ok(false);
    }
    let names = DB::list_cf(&Options::default(), path).map_err(|e| open_error(path, e))?;
    let known = |name: &str| name == "default" || Family::ALL.iter().any(|f| f.name() == name);
    match names.into_iter().find(|name| !known(name)) {
        Some(name) => Err(StoreError::UnknownFamily { path: path.to_path_buf(), name }),
        None => Ok(true),
    }
}

fn open_error(path: &Path, e: rocksdb::Error) -> StoreError {
    let path = path.to_path_buf();
    let text = e.to_string();
    // RocksDB has no code of its own for this.
    let locked = text.contains("lock file") || text.contains("lock hold by current process");
    if locked {
        StoreError::Locked { path }
    } else if is_no_space(&e) {
        StoreError::DiskFull { free_bytes: disk::free_bytes(&path).unwrap_or(0), path, reserve_bytes: 0 }
    } else if matches!(e.kind(), ErrorKind::Corruption | ErrorKind::InvalidArgument | ErrorKind::NotFound) {
        StoreError::Damaged { path, source: e }
    } else {
        StoreError::Database { operation: "open", path, source: e }
    }
}

fn is_no_space(e: &rocksdb::Error) -> bool {
    e.to_string().contains("No space left on device")
}

fn db_options(options: &RocksOptions) -> Options {
    let mut o = Options::default();
    o.create_if_missing(true);
    o.create_missing_column_families(true);
    o.set_max_background_jobs(2);
    o.set_max_open_files(options.open_files_max);
    o.set_db_write_buffer_size(options.write_buffers_bytes);
    o.set_max_total_wal_size(options.wal_bytes_max);
    // A log that vanished or shrank is an error at open, not a silent loss of acknowledged rollouts.
    o.set_track_and_verify_wals_in_manifest(true);
    // A write that the crash cut off is dropped. Damage before the end is an error: what follows it was synced, and may be a
    // vote, without which this node could vote twice. RocksDB's default would open as if it had never been.
    o.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    o.set_bytes_per_sync(MIB as u64);
    o.set_keep_log_file_num(2);
    o.set_max_log_file_size(MIB);
    o.set_log_level(LogLevel::Warn);
    o.set_stats_dump_period_sec(0);
    o.set_stats_persist_period_sec(0);
    o.set_skip_stats_update_on_db_open(true);
    o
}

fn descriptors(options: &RocksOptions) -> Vec<ColumnFamilyDescriptor> {
    let cache = Cache::new_lru_cache(options.cache_bytes);
    let mut all: Vec<_> = Family::ALL
        .iter()
        .map(|f| ColumnFamilyDescriptor::new(f.name(), family_options(*f, options, &cache)))
        .collect();
    let mut unused = Options::default();
    unused.set_write_buffer_size(64 << 10);
    all.push(ColumnFamilyDescriptor::new("default", unused));
    all
}

fn family_options(family: Family, options: &RocksOptions, cache: &Cache) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    table.set_cache_index_and_filter_blocks(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);
    let mut o = Options::default();
    // Most questions for these keys are "do you have it?", and most answers no: in files and in memory.
    if matches!(family, Family::Blobs | Family::BlobIndex | Family::Rollouts | Family::RolloutsByJob | Family::Consumed)
    {
        table.set_bloom_filter(10.0, false);
        o.set_memtable_whole_key_filtering(true);
        o.set_memtable_prefix_bloom_ratio(MEMTABLE_BLOOM_SHARE);
    }
    o.set_block_based_table_factory(&table);
    o.set_write_buffer_size(options.write_buffer_bytes);
    o.set_max_write_buffer_number(3);
    o.set_target_file_size_base(16 * MIB as u64);
    o.set_max_bytes_for_level_base(64 * MIB as u64);
    o.set_compression_type(match family {
        Family::Rollouts => DBCompressionType::Zstd,
        _ => DBCompressionType::Lz4,
    });
    if family.is_bulk() {
        o.set_enable_blob_files(true);
        o.set_min_blob_size(match family {
            Family::Rollouts => ROLLOUT_BLOB_LEN_BYTES_MIN,
            _ => BLOB_LEN_BYTES_MIN,
        });
        o.set_blob_file_size(BLOB_FILE_BYTES);
        o.set_enable_blob_gc(true);
        o.set_blob_gc_age_cutoff(BLOB_GC_AGE_CUTOFF.parse().unwrap_or(0.0));
        // Weights do not compress; token ids and log-probabilities do.
        o.set_blob_compression_type(match family {
            Family::Rollouts => DBCompressionType::Zstd,
            _ => DBCompressionType::None,
        });
    }
    o
}

impl Store for RocksStore {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.db.get_cf(self.family(family), key).map_err(|e| self.read_error("get", family, key, e))
    }

    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        if self.read_only {
            return Err(StoreError::ReadOnly { path: self.path.clone() });
        }
        if batch.is_empty() {
            return match durability {
                Durability::Synced => self.db.flush_wal(true).map_err(|e| self.write_error("sync", e)),
                Durability::Buffered => Ok(()),
            };
        }
        let mut write_options = WriteOptions::default();
        write_options.set_sync(durability == Durability::Synced);
        self.write_with(batch, &write_options)
    }

    fn put_unlogged(&self, family: Family, pairs: Vec<KeyValue>) -> Result<(), StoreError> {
        if self.read_only {
            return Err(StoreError::ReadOnly { path: self.path.clone() });
        }
        let mut batch = Batch::new();
        for (key, value) in pairs {
            batch.put(family, key, value);
        }
        let mut write_options = WriteOptions::default();
        write_options.disable_wal(true);
        self.write_with(batch, &write_options)
    }

    fn settle(&self, family: Family) -> Result<(), StoreError> {
        if self.read_only {
            return Err(StoreError::ReadOnly { path: self.path.clone() });
        }
        // RocksDB syncs the files that it makes of a write buffer, and the list of its files.
        let mut flush_options = FlushOptions::default();
        flush_options.set_wait(true);
        self.db.flush_cf_opt(self.family(family), &flush_options).map_err(|e| self.write_error("settle", e))
    }

    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError> {
        let mut pairs = Vec::new();
        if limit == 0 || to.is_some_and(|to| to <= from) {
            return Ok(pairs);
        }
        let mut read_options = ReadOptions::default();
        if let Some(to) = to {
            read_options.set_iterate_upper_bound(to);
        }
        let mut iter = self.db.raw_iterator_cf_opt(self.family(family), read_options);
        iter.seek(from);
        while let Some((key, value)) = iter.item() {
            pairs.push((key.to_vec(), value.to_vec()));
            if pairs.len() == limit {
                return Ok(pairs);
            }
            iter.next();
        }
        let reached = pairs.last().map_or(from, |(key, _)| key);
        iter.status().map_err(|e| self.read_error("scan", family, reached, e))?;
        Ok(pairs)
    }

    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        let mut read_options = ReadOptions::default();
        read_options.set_iterate_upper_bound(end);
        let mut iter = self.db.raw_iterator_cf_opt(self.family(family), read_options);
        iter.seek_to_last();
        let pair = iter.item().map(|(key, value)| (key.to_vec(), value.to_vec()));
        iter.status().map_err(|e| self.read_error("find the last key", family, end, e))?;
        Ok(pair)
    }

    fn size_bytes(&self) -> Result<u64, StoreError> {
        disk::dir_bytes(&self.path).map_err(|source| StoreError::Io {
            operation: "measure",
            path: self.path.clone(),
            source,
        })
    }

    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError> {
        let free_bytes = disk::free_bytes(&self.path).map_err(|source| StoreError::Io {
            operation: "ask for the free space of",
            path: self.path.clone(),
            source,
        })?;
        // Half: a put needs its length twice, in the log and in a file.
        let disk = free_bytes.saturating_sub(self.disk_reserve_bytes) / 2;
        let quota = match self.quota_bytes {
            Some(quota_bytes) => quota_bytes.saturating_sub(self.used_bytes()?),
            None => u64::MAX,
        };
        Ok(Some(disk.min(quota)))
    }

    fn reclaim(&self) -> Result<(), StoreError> {
        if self.read_only {
            return Err(StoreError::ReadOnly { path: self.path.clone() });
        }
        // Deleted values in the log's write buffers are no files yet, and would bring the log with them.
        self.flush()?;
        for family in Family::ALL.into_iter().filter(|f| f.is_bulk()) {
            let cf = self.family(family);
            let set = |cutoff| self.db.set_options_cf(cf, &[("blob_garbage_collection_age_cutoff", cutoff)]);
            set("1.0").map_err(|e| self.write_error("reclaim", e))?;
            let mut options = CompactOptions::default();
            options.set_bottommost_level_compaction(BottommostLevelCompaction::Force);
            self.db.compact_range_cf_opt(cf, None::<&[u8]>, None::<&[u8]>, &options);
            set(BLOB_GC_AGE_CUTOFF).map_err(|e| self.write_error("reclaim", e))?;
        }
        self.used.lock().unwrap_or_else(PoisonError::into_inner).measured = None;
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        if self.read_only {
            return Err(StoreError::ReadOnly { path: self.path.clone() });
        }
        self.db.flush_wal(true).map_err(|e| self.write_error("sync", e))?;
        let families: Vec<&ColumnFamily> = Family::ALL.iter().map(|f| self.family(*f)).collect();
        let mut flush_options = FlushOptions::default();
        flush_options.set_wait(true);
        self.db.flush_cfs_opt(&families, &flush_options).map_err(|e| self.write_error("flush", e))
    }
}
