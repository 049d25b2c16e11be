// Draws the diagrams of a page of the book. Pages without one do not load the library, which has several megabytes.
(() => {
    const blocks = document.querySelectorAll('pre > code.language-mermaid');
    if (blocks.length === 0) return;
    const library = document.createElement('script');
    library.src = `${path_to_root}mermaid.min.js`;
    library.onload = () => {
        const isDark = ['ayu', 'coal', 'navy'].some(name => document.documentElement.classList.contains(name));
        mermaid.initialize({ startOnLoad: false, theme: isDark ? 'dark' : 'default' });
        for (const block of blocks) {
            const diagram = document.createElement('pre');
            diagram.className = 'mermaid';
            diagram.textContent = block.textContent;
            block.parentElement.replaceWith(diagram);
        }
        mermaid.run();
    };
    document.head.append(library);
})();
