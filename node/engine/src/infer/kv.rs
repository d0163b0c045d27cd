//! Keys and values of running sequences in blocks of sixteen tokens, shared along common prompt prefixes.

use std::collections::HashMap;
use std::sync::Arc;

use crate::kernels::attention::{AttentionShape, BLOCK, store_rows, store_transposed};

/// Bytes that blocks of finished prompts may keep for later requests with the same prefix.
const PREFIX_CACHE_BYTES: usize = 256 << 20;
/// Bytes of free blocks kept for reuse.
const FREE_BYTES: usize = 256 << 20;

/// The layout of one block: `[layer][keys | values]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvLayout {
    /// Head counts and width.
    pub(crate) shape: AttentionShape,
    /// Decoder layers.
    pub(crate) layers: usize,
}

impl KvLayout {
    /// Floats of one block.
    fn block_floats(&self) -> usize {
        self.layers * 2 * self.shape.block_len()
    }

    fn keys_at(&self, layer: usize) -> std::ops::Range<usize> {
        let from = layer * 2 * self.shape.block_len();
        from..from + self.shape.block_len()
    }

    fn values_at(&self, layer: usize) -> std::ops::Range<usize> {
        let from = (layer * 2 + 1) * self.shape.block_len();
        from..from + self.shape.block_len()
    }
}

/// One sequence's cache. Full blocks may be shared; the last, partly filled one never is.
#[derive(Debug, Default)]
pub(crate) struct KvCache {
    blocks: Vec<Arc<[f32]>>,
    /// Tokens whose keys and values are stored.
    pub(crate) len: usize,
}

impl KvCache {
    /// Stores the rotated key row and the value row of token `position` for one layer.
    ///
    /// `position` is at or after every shared block; the store into a shared block is skipped, as it holds these bits.
    pub(crate) fn store(&mut self, layout: KvLayout, layer: usize, position: usize, key: &[f32], value: &[f32]) {
        let Some(block) = self.blocks.get_mut(position / BLOCK).and_then(Arc::get_mut) else {
            debug_assert!(false, "token {position} has no block of its own");
            return;
        };
        store_transposed(key, position % BLOCK, &mut block[layout.keys_at(layer)]);
        store_rows(value, position % BLOCK, layout.shape.head_dim, &mut block[layout.values_at(layer)]);
    }

    /// One layer's key blocks and value blocks.
    pub(crate) fn layer(&self, layout: KvLayout, layer: usize) -> (Vec<&[f32]>, Vec<&[f32]>) {
        self.blocks.iter().map(|b| (&b[layout.keys_at(layer)], &b[layout.values_at(layer)])).unzip()
    }
}

/// A block of some prompt, found by the block before it and its own tokens.
#[derive(Debug)]
struct PrefixNode {
    id: u64,
    block: Arc<[f32]>,
    used: u64,
}

/// What leads to a [`PrefixNode`]: the id of the node before it (0 for the first) and its tokens.
type PrefixKey = (u64, [u32; BLOCK]);

/// Hands out blocks, takes them back, and remembers the blocks of prompts.
#[derive(Debug)]
pub(crate) struct BlockStore {
    layout: KvLayout,
    free: Vec<Arc<[f32]>>,
    prefixes: HashMap<PrefixKey, PrefixNode>,
    last_id: u64,
    tick: u64,
}

/// The full blocks of a prompt without its last token, which is always left to compute.
fn full_blocks(prompt: &[u32]) -> &[[u32; BLOCK]] {
    prompt[..prompt.len().saturating_sub(1)].as_chunks::<BLOCK>().0
}

impl BlockStore {
    /// An empty store.
    pub(crate) fn new(layout: KvLayout) -> Self {
        Self { layout, free: Vec::new(), prefixes: HashMap::new(), last_id: 0, tick: 0 }
    }

    /// Gives `cache` room for `tokens` more tokens.
    pub(crate) fn reserve(&mut self, cache: &mut KvCache, tokens: usize) {
        let blocks = (cache.len + tokens).div_ceil(BLOCK);
        while cache.blocks.len() < blocks {
            let mut block = self.free.pop().unwrap_or_else(|| vec![0f32; self.layout.block_floats()].into());
            // Attention multiplies the values behind the last token by zero: they must not be NaN.
            if let Some(values) = Arc::get_mut(&mut block) {
                values.fill(0.0);
            }
            cache.blocks.push(block);
        }
    }

    /// A cache that starts with the longest known prefix of `prompt`.
    pub(crate) fn start(&mut self, prompt: &[u32]) -> KvCache {
        self.tick += 1;
        let mut cache = KvCache::default();
        let mut parent = 0;
        for tokens in full_blocks(prompt) {
            let Some(node) = self.prefixes.get_mut(&(parent, *tokens)) else { break };
            node.used = self.tick;
            parent = node.id;
            cache.blocks.push(Arc::clone(&node.block));
            cache.len += BLOCK;
        }
        cache
    }

    /// Tokens of `prompt` that [`BlockStore::start`] would find.
    pub(crate) fn known(&self, prompt: &[u32]) -> usize {
        let mut parent = 0;
        let found = full_blocks(prompt).iter().take_while(|tokens| match self.prefixes.get(&(parent, **tokens)) {
            Some(node) => {
                parent = node.id;
                true
            }
            None => false,
        });
        found.count() * BLOCK
    }

    /// Remembers the full blocks of a computed prompt; the least recently used half goes when memory runs out.
    pub(crate) fn remember(&mut self, prompt: &[u32], cache: &KvCache) {
        let mut parent = 0;
        for (tokens, block) in full_blocks(prompt).iter().zip(&cache.blocks) {
            let node = self.prefixes.entry((parent, *tokens)).or_insert_with(|| {
                self.last_id += 1;
                PrefixNode { id: self.last_id, block: Arc::clone(block), used: self.tick }
            });
            // A parent is never older than its children, so that eviction takes children first.
            node.used = self.tick;
            parent = node.id;
        }
        let capacity = (PREFIX_CACHE_BYTES / 4 / self.layout.block_floats().max(1)).max(1);
        if self.prefixes.len() > capacity {
            let mut used: Vec<u64> = self.prefixes.values().map(|n| n.used).collect();
            used.sort_unstable();
            let cut = used[used.len() / 2];
            self.prefixes.retain(|_, n| n.used > cut);
        }
    }

    /// Forgets all prefixes: they belong to other weights.
    pub(crate) fn forget(&mut self) {
        for (_, node) in std::mem::take(&mut self.prefixes) {
            self.give_back(node.block);
        }
    }

    /// Takes a finished sequence's blocks back.
    pub(crate) fn release(&mut self, cache: KvCache) {
        for block in cache.blocks {
            self.give_back(block);
        }
    }

    fn give_back(&mut self, mut block: Arc<[f32]>) {
        let room = FREE_BYTES / 4 / self.layout.block_floats().max(1);
        if self.free.len() < room && Arc::get_mut(&mut block).is_some() {
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        KvLayout { shape: AttentionShape { heads: 2, kv_heads: 1, head_dim: 4 }, layers: 2 }
    }

    #[test]
    fn a_prompts_full_blocks_are_found_again_but_never_its_last_token() {
        let mut store = BlockStore::new(layout());
        let prompt: Vec<u32> = (0..32).collect();
        let mut cache = store.start(&prompt);
        store.reserve(&mut cache, 32);
        cache.len = 32;
        store.remember(&prompt, &cache);
        assert_eq!(store.known(&prompt), 16);
        let longer: Vec<u32> = (0..40).collect();
        assert_eq!(store.start(&longer).len, 16);
        let other: Vec<u32> = (1..41).collect();
        assert_eq!(store.start(&other).len, 0);
        store.forget();
        assert_eq!(store.known(&longer), 0);
    }

    #[test]
    fn released_blocks_are_reused_unless_shared() {
        let mut store = BlockStore::new(layout());
        let prompt: Vec<u32> = (0..20).collect();
        let mut cache = store.start(&prompt);
        store.reserve(&mut cache, 20);
        cache.len = 20;
        store.remember(&prompt, &cache);
        store.release(cache);
        assert_eq!(store.free.len(), 1);
    }
}
